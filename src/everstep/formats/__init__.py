"""Formats of others: weights that programs without everstep have written, and files for such programs."""

from everstep.formats.foreign import DISTRIBUTED, Foreign, byte_count, open_foreign, write_shards

__all__ = ["DISTRIBUTED", "Foreign", "byte_count", "open_foreign", "write_shards"]
