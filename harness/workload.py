"""The trace of an experiment, in memory and in order of arrival."""

from __future__ import annotations

from dataclasses import dataclass

from harness.errors import InputError
from harness.experiment import Experiment
from harness.load.arrivals import arriving, in_order
from harness.trace.model import Call, Session
from harness.trace.read import read_trace


@dataclass(slots=True)
class Loaded:
    """A trace in memory, in order of arrival."""

    sessions: list[Session]
    path: str

    @property
    def calls(self) -> int:
        return sum(len(s.calls) for s in self.sessions)

    def sent(self, max_call_tokens: int | None) -> list[Call]:
        """Calls that are not left out for their length."""
        return [
            call
            for session in self.sessions
            for call in session.calls
            if max_call_tokens is None or call.sequence_tokens <= max_call_tokens
        ]


def load_sessions(experiment: Experiment) -> Loaded:
    """Read the experiment's trace."""
    sessions: list[Session] = []
    for session in read_trace(experiment.trace.path, blocks=experiment.trace.blocks):
        if experiment.trace.sessions is not None and len(sessions) == experiment.trace.sessions:
            break
        sessions.append(session)
    loaded = Loaded(in_order(experiment.load, sessions, experiment.seed), experiment.trace.path)
    seen: set[str] = set()
    for session in sessions:
        if session.id in seen:
            raise InputError(
                experiment.trace.path,
                f"two sessions are called {session.id}",
                "rename one, or replay the files one by one",
            )
        seen.add(session.id)
    longest = experiment.trace.max_call_tokens
    if longest is not None and loaded.calls and not loaded.sent(longest):
        raise InputError(
            experiment.trace.path,
            f"all {loaded.calls} calls are longer than trace.max_call_tokens ({longest:,})",
            "raise it or set it to null, and choose a profile whose KV cache can hold them (`harness profile list`)",
        )
    return loaded


def as_sent(experiment: Experiment, loaded: Loaded) -> tuple[Loaded, list[int]]:
    """The trace as a run sends it, and when each session arrives in ns (see `arriving`)."""
    sessions, starts_ns = arriving(
        experiment.load, loaded.sessions, experiment.cluster.nodes, experiment.seed, "experiment"
    )
    return Loaded(sessions, loaded.path), starts_ns
