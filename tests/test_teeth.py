"""The gate has teeth: faults that are planted in a copy of the library die by its tests."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from test_gate import gate_source, is_campaign

TESTS = Path(__file__).parent
LIBRARY = TESTS.parent / "src" / "everstep"


class Edit(NamedTuple):
    """One change of a statement, which is found by its text, wherever in the library it stands.

    Attributes:
        statement: pattern of its first line, as `ast.unparse` writes it.
        to: what takes its place; "" for nothing.
        beside: pattern of a statement in the same block; `to` takes the place before that one.
        behind: the same, and the place behind that one.
    """

    statement: str
    to: str
    beside: str = ""
    behind: str = ""


class Fault(NamedTuple):
    """Edits that are made together, and the test that must fail by them."""

    edits: tuple[Edit, ...]
    test: str


SAVE = "supervisor/test_forged_checkpoints.py::test_rows_then_the_checkpoint_then_retention"
ORDER = "checkpoint/test_checkpoint_crash.py::test_the_real_calls_put_data_then_the_name_then_its_folder"
COMMIT = r"committed = self\._write_checkpoint\("
FAULTS = {
    "no fsync of the folder": Fault(
        (
            Edit(
                r"try:\n\s+files\.rename\(new, target\)\n\s+files\.fsync_folder\(target\.parent\)\nexcept",
                "files.rename(new, target)",
            ),
        ),
        ORDER,
    ),
    "no fsync of the data": Fault((Edit(r"os\.fsync\(file\.fileno\(\)\)", "", beside=r"yield file"),), ORDER),
    "no fsync of the folder that is renamed": Fault(
        (Edit(r"files\.fsync_folder\(folder\)", "", beside=r"manifest = pack_manifest"),), ORDER
    ),
    "retention before the commit": Fault(
        (
            Edit(
                r"if self\.\w+\.writer:\n\s+self\._opening\.mirror\.retain_and_upload",
                "=",
                beside=r"with self\._together\(snapshot\):\n\s+if",
            ),
        ),
        SAVE,
    ),
    "a checkpoint before its rows": Fault((Edit(r"self\._journal\.fsync_only\(snapshot", ""),), SAVE),
    "best weights named before they are there": Fault(
        (Edit(r"if self\.\w+\.writer and \(?not spread", "=", behind=COMMIT),), SAVE
    ),
    "random state before the iterator": Fault(
        (
            Edit(r"restore\(self\.\w+\.random\)", "=", beside=r"self\.\w+\.open_bound\("),
            Edit(
                r"with isolated\(\):\n\s+cursor = ",
                "cursor = self.stream.open(self.name, pass_index, position, seed=self._streams.seed)",
            ),
        ),
        "laws/test_law1_any_step.py::test_crashed_anywhere",
    ),
    "a dropped generator": Fault(
        (Edit(r"backends\.get\(name\)\.set_random_state\(state\)", "pass"),), "state/test_entries.py"
    ),
    "no check of checksums": Fault(
        (Edit(r"if checksum\.hexdigest\(\) != record", ""),), "checkpoint/test_checkpoint_crash.py"
    ),
    "a position that is off by one": Fault(
        (Edit(r"return self\._handed_out if", "return self._handed_out + 1 if self._knows_done else None"),),
        "data/test_arrays.py",
    ),
    "no state of the optimizer": Fault(
        (Edit(r"self\.obj\.load_state_dict\(\{key: part", ""),), "backends/test_torch_entries.py"
    ),
    "a row twice": Fault(
        (
            Edit(
                r"self\._journal\.append\(block\)", "self._journal.append(block); self._journal.append(block)"
            ),
        ),
        "loop/test_loop_leaving.py::test_a_resumed_epoch_has_the_rows_and_lines_of_the_whole",
    ),
    "random state of another moment": Fault(
        (
            Edit(
                r"now_key, lines_key = random_parts\(rank\)",
                "now_key, lines_key = random_parts(rank); capture = engine.rng_marks.tree",
                beside=r"tree = \{'progress': current\.tree",
            ),
        ),
        "laws/test_law1_any_step.py::test_crashed_anywhere",
    ),
    "a link of the ledger left out": Fault(
        (
            Edit(
                r"for batch in batches:\n\s+chain = link",
                "for batch in batches[1:]:\n    chain = link(batch, chain)",
                behind=r"self\._of = of",
            ),
        ),
        "record/test_audit.py::test_over_crashes_every_sample_is_used_once",
    ),
    "an fsync before the rows": Fault(
        (
            Edit(
                r"self\.fsync_only\(self\.flush\(\)\)",
                "self.fsync_only(Position(1, self._durable_size)); self.flush()",
            ),
        ),
        "record/test_journal_reading.py",
    ),
    "retention of what is needed": Fault(
        (
            Edit(
                r"kept_names = \{facts\.name for facts in",
                "kept_names = {facts.name for facts in (*newest, *present[-1:])}",
            ),
        ),
        "checkpoint/test_checkpoint_store.py",
    ),
    "a comparison of nothing": Fault(
        (Edit(r"self\.differing \+= 1", ""), Edit(r"if self\.difference is None or step <", "")),
        "record/test_step_comparison.py",
    ),
    "a batch twice behind a thread": Fault(
        (Edit(r"self\._position = item\.position", "=", behind=r"yield item\.batch"),),
        "data/test_dataloader.py",
    ),
    "the optimizer before the model": Fault(
        (
            Edit(
                r"for name, entry in self\.entries\.items\(\):\n\s+if part is None or name in part:\n",
                "for name, entry in reversed(self.entries.items()):\n"
                "    if part is None or name in part:\n        entry.load(user[name])",
            ),
        ),
        "supervisor/test_supervisor_start.py::test_objects_are_restored_in_the_order_of_the_state",
    ),
    "best weights of a later step": Fault(
        (
            Edit(
                r"if place\.step == boundary\.step:",
                "return Outcome(actions=(SaveBest(self.metric, place.value, tuple(self._kept_names())),))",
            ),
            Edit(r"for place in self\.places:\n\s+if place\.step == step:", "self.places[0].name = name"),
        ),
        "loop/test_loop_leaving.py::"
        "test_weights_that_were_trained_on_since_the_measurement_are_not_kept_as_the_best",
    ),
    "the clock in the digest": Fault(
        (
            Edit(
                r"draft = replace\(snapshot\.draft, common=common, digest=digest\(part\)",
                "draft = replace(snapshot.draft, common=common, digest=digest(part, ()), own=own, "
                "replicated=replicated)",
            ),
        ),
        "supervisor/test_supervisor_start.py::test_resume_from_a_step_a_name_or_a_path",
    ),
    "the pieces of a rank left out": Fault(
        (
            Edit(
                r"files_of, pieces = \(\[part\.files for part in parts\]",
                "files_of, pieces = [part.files for part in parts[:1]], [part.pieces for part in parts[:1]]",
            ),
        ),
        "group/test_rank_commit.py::test_every_save_ends_alike_on_all_ranks",
    ),
}


def blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                yield block


@cache
def unparsed(text: str) -> list[list[str]]:
    """The statements of each block; a definition is ""."""
    everything = blocks(ast.parse(text))
    return [["" if hasattr(one, "name") else ast.unparse(one) for one in block] for block in everything]


def where(block: list[str], pattern: str) -> list[int]:
    return [at for at, statement in enumerate(block) if re.match(pattern, statement)]


def place_of(library: Path, edit: Edit) -> tuple[Path, int]:
    """Find the one block of the library that has the edit's statements: its file, and its number there."""
    wanted = [pattern for pattern in (edit.statement, edit.beside, edit.behind) if pattern]
    words = set(re.findall(r"[a-z_]{3,}", re.sub(r"\\.", " ", " ".join(wanted))))
    found = []
    for path in sorted(library.rglob("*.py")):
        text = path.read_text()
        if all(word in text for word in words):
            for number, block in enumerate(unparsed(text)):
                found += [(path, number)] if all(where(block, each) for each in wanted) else []
    assert len(found) == 1, f"{edit.statement} stands at {len(found)} places: mend this edit"
    return found[0]


def plant(library: Path, edit: Edit) -> None:
    """Make the edit."""
    path, number = place_of(library, edit)
    tree = ast.parse(path.read_text())
    block, texts = list(blocks(tree))[number], unparsed(path.read_text())[number].copy()
    (at,) = where(texts, edit.statement)
    old, _ = block.pop(at), texts.pop(at)
    new = [old] if edit.to == "=" else ast.parse(edit.to or "pass").body
    if place := edit.beside or edit.behind:
        at = where(texts, place)[0] + bool(edit.behind)
    block[at:at] = new
    path.write_text(ast.unparse(tree))


def with_library(library: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    """Run these tests, as far as the gate has them, with the library that lies there."""
    options = ["-q", "-x", "-p", "no:cacheprovider"]
    program = f"import everstep, pytest, sys; assert everstep.__file__.startswith({str(library)!r}); "
    return subprocess.run(
        [sys.executable, "-c", program + "sys.exit(pytest.main(sys.argv[1:]))", *options, *tests],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": str(library.parent)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(LIBRARY, tmp_path / "everstep", ignore=shutil.ignore_patterns("__pycache__")))


def test_each_edit_finds_its_statement() -> None:
    for fault in FAULTS.values():
        for edit in fault.edits:
            path, number = place_of(LIBRARY, edit)
            assert len(where(unparsed(path.read_text())[number], edit.statement)) == 1, edit.statement


def test_each_fault_has_its_test_in_the_gate() -> None:
    missing = []
    for file, _, name in {fault.test.partition("::") for fault in FAULTS.values()}:
        path = TESTS / file
        is_there = path.is_file() and not is_campaign(path)
        if not is_there or not re.search(rf"^def {name or 'test_'}", gate_source(path), re.M):
            missing.append(f"{file}::{name}")
    assert missing == []


@pytest.mark.campaign("long")
def test_without_a_fault_they_pass(copy: Path) -> None:
    done = with_library(copy, *{fault.test for fault in FAULTS.values()})
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.campaign("long")
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_dies_in_the_gate(copy: Path, name: str) -> None:
    fault = FAULTS[name]
    for edit in fault.edits:
        plant(copy, edit)
    done = with_library(copy, fault.test)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"FAILED {fault.test}" in done.stdout
