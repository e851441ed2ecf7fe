"""Trials of what a run takes at its word, once per start: recorded, and said where they fail."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everstep.record import Journal
from everstep.supervisor.state_trial import StateTrial
from everstep.supervisor.streams import Streams
from everstep.supervisor.trial import Verdict
from everstep.supervisor.voice import Voice


class Trials:
    """Makes the trials of one start.

    Args:
        voice: tells the user.
    """

    def __init__(
        self,
        streams: Streams,
        state: StateTrial,
        journal: Journal,
        voice: Voice,
    ) -> None:
        self._streams, self._state, self._journal = streams, state, journal
        self._voice = voice

    def try_streams(self) -> None:
        """Try each stream that has given its first batch."""
        for name, verdict in self._streams.try_words():
            self._note("stream", name, verdict)
            if verdict.kept is False:
                say = self._voice.say if verdict.replays else self._voice.warn
                say(f"stream {name!r}: {verdict}")

    def try_state(self) -> None:
        """Try the state, at its first save after a step."""
        for name, verdict in self._state.verdicts():
            self._note("state", name, verdict)
            if verdict.kept is False:
                self._voice.warn(
                    f"state entry {name!r}: {verdict.told}; a resume begins that anew: save it in "
                    "state_dict, unless no later step reads it"
                )

    def try_parts(self, user: Mapping[str, Any]) -> None:
        """Look for entries that have grown, in a saved `user` branch."""
        for name, verdict in self._state.outgrown(user):
            self._note("state", name, verdict)
            self._voice.warn(
                f"state entry {name!r}: {verdict.told}; a resume makes the object without them and is "
                f"refused: make them before the loop opens, or leave {name!r} out of state"
            )

    def _note(self, kind: str, name: str, verdict: Verdict) -> None:
        self._journal.event("tried", {kind: name, **verdict._asdict()}, wall=True)
