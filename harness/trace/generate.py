"""Synthetic agentic sessions from a profile: same profile, seed and number, same sessions, on every platform.

Random numbers are Python's Mersenne twister, one stream per session. What is drawn once per session is spread
evenly over the sessions instead of independently, so that totals depend little on the seed although the
distributions have heavy tails. docs/trace-synthesis.md explains the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from harness.trace.drafts import Draft, Drafts
from harness.trace.model import Session, SharedPrefix
from harness.trace.profile import LogNormal, Mixture, Model, Profile, SidePart, SubPart, by_share, pick

TURNS, SUB, SIDE, WINDOW, FIRST, MODEL = range(6)
"""What is spread evenly over the sessions: columns of the even spread."""
MAIN_PREFIX, SUB_PREFIX = 0, 1
"""Indexes of a session's shared prefixes."""


CANDIDATES = 64
"""Even spreads that are drawn for a trace; the one nearest to their average is taken."""
CALLS_PER_TURN, CALLS_PER_GROUP = 2, 25
"""Rough sizes by which candidates are compared."""


def generate_sessions(profile: Profile, seed: int, sessions: int) -> Iterator[Session]:
    """`sessions` sessions of a profile, one at a time."""
    spread = balanced_spread(profile, Random(f"{profile.name}/{seed}/spread"), sessions)
    for number, u in enumerate(spread):
        rng = Random(f"{profile.name}/{seed}/{number}")
        yield _SessionMaker(profile, rng, u).make(f"{profile.name}-{seed}-{number:04d}")


def balanced_spread(profile: Profile, rng: Random, sessions: int) -> list[tuple[float, ...]]:
    """The per-session numbers of a trace: of several even spreads the one whose totals are nearest to their average.

    A few sessions hold most calls, so even evenly spread numbers give traces of uneven size; how large the sessions
    are that have sub-agents or a small window matters as much.
    """
    candidates = [evenly_spread(rng, sessions, 6) for _ in range(CANDIDATES)]
    sizes = [_sizes(profile, candidate) for candidate in candidates]
    means = [sum(column) / CANDIDATES or 1.0 for column in zip(*sizes, strict=True)]
    distances = [sum((x / mean - 1) ** 2 for x, mean in zip(size, means, strict=True)) for size in sizes]
    return candidates[distances.index(min(distances))]


def _sizes(profile: Profile, spread: list[tuple[float, ...]]) -> list[float]:
    """Calls, groups, calls under the first window and calls of the largest 1 % of sessions, roughly."""
    calls, groups, windowed = [], 0, 0
    first = profile.session.window_tokens[0]
    for u in spread:
        turns = round(profile.session.turns.at(u[TURNS]))
        count = group_count(profile, turns, u[SUB])
        size = CALLS_PER_TURN * turns + CALLS_PER_GROUP * count
        calls.append(size)
        groups += count
        windowed += size if by_share(profile.session.window_tokens, u[WINDOW]) is first else 0
    largest = sum(sorted(calls)[-max(1, len(calls) // 100) :])
    return [float(sum(calls)), float(groups), float(windowed), float(largest)]


def group_count(profile: Profile, turns: int, u: float) -> int:
    """Sub-agent groups of a session of so many turns; `u` (0..1) decides both whether and how many."""
    sub = profile.sub_agents
    if sub is None or u >= (share := sub.session_share.of(turns)):
        return 0
    # Given that the session has groups, u / share is uniform, and as evenly spread over the sessions as u is.
    groups = sub.groups.at(u / share) * sub.groups_by_turns.of(turns)
    return max(1, min(int(sub.groups.max), round(groups)))


def evenly_spread(rng: Random, rows: int, columns: int) -> list[tuple[float, ...]]:
    """`rows` points of the unit cube in random order; the first column evenly spaced, every pair evenly covered.

    A Hammersley set whose further columns are an additive recurrence with powers of the generalised golden ratio
    (M. Roberts, 2018: the R sequence), each column shifted at random.
    """
    if rows == 0:
        return []
    ratio = 2.0
    for _ in range(60):
        ratio = (1.0 + ratio) ** (1.0 / columns)
    shifts = [rng.random() / rows, *(rng.random() for _ in range(columns - 1))]
    steps = [1.0 / rows, *(ratio ** -(column + 1) for column in range(columns - 1))]
    points = [tuple((s + row * step) % 1.0 for s, step in zip(shifts, steps, strict=True)) for row in range(rows)]
    rng.shuffle(points)
    return points


@dataclass(slots=True)
class _Style:
    """What the calls of one chain have in common."""

    chain: str
    model: Model
    added: Mixture
    output: LogNormal
    gap_s: Mixture


class _SessionMaker:
    """Builds one session; the methods follow the parts of the profile."""

    def __init__(self, profile: Profile, rng: Random, u: tuple[float, ...]) -> None:
        self.p, self.rng, self.u = profile, rng, u
        self.drafts = Drafts(profile.block_tokens)
        self.turns = round(profile.session.turns.at(u[TURNS]))
        self.growth = profile.session.growth.of(self.turns)
        self.window = self._blocks(by_share(profile.session.window_tokens, u[WINDOW]).tokens)
        self.model: Model = by_share(profile.models.session, u[MODEL])
        self.main_prefix = self._blocks(profile.shared_prefix.main.tokens)
        sub_agent = profile.shared_prefix.sub_agent
        self.sub_prefix = self._blocks(sub_agent.tokens) if sub_agent else 0
        self.first_sub = -1
        self.groups = 0
        self.sides = 0
        self.group_ends: list[int] = []

    def make(self, session_id: str) -> Session:
        """The session, its calls in order of time."""
        self._main_conversation()
        shared = self.p.shared_prefix
        prefixes = [SharedPrefix(shared.main.key, self.main_prefix)]
        if shared.sub_agent:
            prefixes.append(SharedPrefix(shared.sub_agent.key, self.sub_prefix))
        return self.drafts.session(session_id, tuple(prefixes) if shared.enabled else ())

    # Draws

    def _blocks(self, tokens: float) -> int:
        return max(1, round(tokens / self.p.block_tokens))

    def _ms(self, distribution: LogNormal) -> int:
        return round(distribution.draw(self.rng) * 1000)

    def _added(self, mixture: Mixture, scale: float = 1.0) -> int:
        return self._blocks(pick(mixture, self.rng).draw(self.rng) * scale)

    def _chance(self, share: float) -> bool:
        return self.rng.random() < share

    def _poisson(self, mean: float) -> int:
        """Number of events of a Poisson process in one unit of time."""
        count, left = 0, self.rng.expovariate(1.0)
        while left < mean:
            count += 1
            left += self.rng.expovariate(1.0)
        return count

    def _group_batches(self, sub: SubPart) -> list[tuple[int, int]]:
        """(turn, groups) of each batch of sub-agent groups, by turn; empty without sub-agents."""
        left = group_count(self.p, self.turns, self.u[SUB])
        batches = []
        while left > 0:
            size = min(left, sub.batch[self.rng.randrange(len(sub.batch))])
            batches.append((self.rng.randrange(1, max(2, self.turns)), size))
            left -= size
        return sorted(batches)

    def _break_turns(self) -> set[int]:
        """Turns after which the user is away, besides those of the gap mixture."""
        count = self._poisson(self.p.main.breaks_per_session)
        return {self.rng.randrange(max(1, self.turns - 1)) for _ in range(count)}

    def _cut_at(self) -> float:
        """Blocks at which the main context is compacted next."""
        compaction = self.p.main.compaction
        return self.window * (compaction.at_min + self.rng.random() * (compaction.at_max - compaction.at_min))

    # The parts of a session

    def _add(
        self,
        style: _Style,
        blocks: int,
        ref: int,
        keep: int,
        gap_ms: int,
        deps: tuple[int, ...] = (),
        on: int | None = None,
        prefix: int = -1,
    ) -> int:
        """A call that starts `gap_ms` after the last of its events; returns its draft number."""
        tokens = round(style.output.draw(self.rng))
        service = self.p.service
        seconds = service.base_s + service.per_output_token_s * tokens
        seconds += service.per_input_token_s * blocks * self.p.block_tokens
        seconds *= LogNormal(median=style.model.duration, sigma=service.noise_sigma).draw(self.rng)
        return self.drafts.add(
            Draft(
                chain=style.chain,
                model=style.model.name,
                t_ms=self.drafts.released_ms(deps, on) + gap_ms,
                api_ms=max(1, round(seconds * 1000)),
                gap_ms=gap_ms,
                blocks=blocks,
                tail_tokens=self.rng.randrange(self.p.block_tokens),
                output_tokens=tokens,
                ref=ref,
                keep=keep,
                deps=deps,
                on=on,
                prefix=prefix,
            )
        )

    def _chain(self, style: _Style, length: int, fork: tuple[int, int, int], gap_ms: int, on: int) -> int:
        """A chain of calls begun `gap_ms` after the start of call `on`; returns the last.

        `fork`: (ref, blocks kept of it, blocks before the first call adds its own).
        """
        ref, keep, blocks = fork
        current = on
        for number in range(length):
            context = min(blocks + self._added(style.added), self.window)
            if context <= keep:
                break
            if number == 0:
                current = self._add(style, context, ref, keep, gap_ms, on=on)
            else:
                gap_ms = self._ms(pick(style.gap_s, self.rng))
                current = self._add(style, context, ref, keep, gap_ms, (current,))
            ref, keep, blocks = current, context, context
        return current

    def _main_conversation(self) -> None:
        main, sub, side = self.p.main, self.p.sub_agents, self.p.side_chains
        style = _Style("main", self.model, main.added_tokens, main.output_tokens, main.gap_s)
        batches = self._group_batches(sub) if sub else []
        breaks = self._break_turns()
        away = next((part for part in main.gap_s if part.kind == "away"), main.gap_s[-1])
        if side and self.u[SIDE] >= side.session_share:
            side = None
        context = min(max(self._blocks(main.first_tokens.at(self.u[FIRST])), self.main_prefix), self.window)
        cut_at = self._cut_at()
        ref, keep, prefix = -1, 0, MAIN_PREFIX
        waited: tuple[int, ...] = ()
        gap_ms = 0
        history: list[int] = []
        while len(history) < self.turns or len(self.drafts) < self.p.session.min_calls:
            turn = len(history)
            current = self._add(style, context, ref, keep, gap_ms, waited, prefix=prefix)
            history.append(current)
            joined = [current]
            if side:
                joined += self._side_chains(side, current, turn)
            if sub:
                joined += self._groups(sub, current, turn, batches)
            waited = tuple(joined)
            part = away if turn in breaks else pick(main.gap_s, self.rng)
            gap_ms = self._ms(part)
            if part.kind != "tool":
                self.drafts[current].stop = "end_turn"
            ref, keep, prefix = current, context, -1
            if self._chance(main.rewind.share):
                ref = history[max(0, turn - self.rng.randint(1, main.rewind.turns_max))]
                keep = self.drafts[ref].blocks
            context = keep + self._added(style.added, self.growth)
            if context > cut_at:
                ref, keep = history[0], min(self.main_prefix, self.drafts[history[0]].blocks)
                size = min(self._blocks(main.compaction.to_tokens.draw(self.rng)), self.window)
                context = max(keep + 1, size)
                cut_at = self._cut_at()
        self.drafts[history[-1]].stop = "end_turn"

    def _side_chains(self, side: SidePart, main: int, turn: int) -> list[int]:
        """Chains begun while a main call runs; returns the last calls of those that the next turn awaits."""
        root = self.drafts[main]
        joined = []
        for number in range(self._poisson(side.per_turn) + (side.at_first_turn if turn == 0 else 0)):
            self.sides += 1
            # The length of a session's first chain is spread evenly over the sessions, like all that is drawn once.
            first = turn == 0 and number == 0
            u = self.u[SIDE] / side.session_share if first else self.rng.random()
            style = _Style(f"f{self.sides}", self.model, side.added_tokens, self.p.main.output_tokens, side.gap_s)
            length = max(1, round(side.calls.at(u)))
            if self._chance(side.fork_share):
                fork = (main, root.blocks, root.blocks)
            else:
                keep = min(self.main_prefix, self.drafts[0].blocks)
                fork = (0, keep, max(keep, self._blocks(side.fresh_tokens.draw(self.rng))))
            start = side.start.min + self.rng.random() * (side.start.max - side.start.min)
            last = self._chain(style, length, fork, round(root.api_ms * start), main)
            if self._chance(side.joined_share):
                joined.append(last)
        return joined

    def _groups(self, sub: SubPart, main: int, turn: int, batches: list[tuple[int, int]]) -> list[int]:
        """Begins the batches that are due after a main call; returns the calls that the next turn awaits.

        A batch for which too many groups still run is left for a later turn.
        """
        joined: list[int] = []
        gap_ms = 0
        while batches and batches[0][0] <= turn:
            # Batches of one turn begin one after the other: a session's first group is also the first in
            # time.
            begin_ms = gap_ms + self._ms(sub.start_gap_s)
            now = self.drafts[main].end_ms + begin_ms
            self.group_ends = [end for end in self.group_ends if end > now]
            size = min(batches[0][1], sub.at_once_max)
            if len(self.group_ends) + size > sub.at_once_max:
                break
            batches.pop(0)
            waits = self._chance(sub.joined_share)
            lanes_left = sub.batch_calls_max - size
            last: list[int] = []
            for place in range(size):
                ends, lanes_left = self._group(sub, main, begin_ms + 50 * place, lanes_left)
                self.group_ends.append(max(self.drafts[end].end_ms for end in ends))
                last += ends
            gap_ms = begin_ms + 50 * size
            if waits:
                joined += last
        return joined

    def _group(self, sub: SubPart, after: int, gap_ms: int, lanes_left: int) -> tuple[list[int], int]:
        """One group: its own chain, and short chains (lanes) beside it.

        Returns their last calls, and how many lanes the batch may still begin at once.
        """
        self.groups += 1
        fast = self.p.models.sub_agent_fast
        model = fast if fast and self._chance(fast.share) else self.model
        calls = max(1, round(sub.calls.draw(self.rng)))
        own = max(1, round(calls * sub.own_share))
        lanes_at = self._lanes(sub, calls - own, own)
        if self._chance(sub.fork_share):
            ref, keep, prefix = after, self.drafts[after].blocks, -1
            context = max(keep + 1, min(keep + self._added(sub.added_tokens), self.window))
        else:
            ref, keep, prefix = self._sub_prefix_of()
            context = max(keep + 1, self.sub_prefix, self._blocks(sub.first_tokens.draw(self.rng)))
        ends: list[int] = []
        waited: tuple[int, ...] = (after,)
        lane = 0
        for number in range(own):
            style = _Style(f"s{self.groups}.0", model, sub.added_tokens, sub.output_tokens, sub.gap_s)
            current = self._add(style, context, ref, keep, gap_ms, waited, prefix=prefix)
            if prefix == SUB_PREFIX:
                self.first_sub = current
            joined = [current]
            lengths = lanes_at.get(number, [])
            for length in lengths[: max(0, lanes_left)] if number == 0 else lengths:
                lane += 1
                style.chain = f"s{self.groups}.{lane}"
                last = self._lane(sub, style, length, current)
                (joined if self._chance(sub.lane_joined_share) else ends).append(last)
            if number == 0:
                lanes_left -= len(lengths)
            waited = tuple(joined)
            ref, keep, prefix = current, context, -1
            context = min(context + self._added(sub.added_tokens), self.window)
            gap_ms = self._ms(pick(sub.gap_s, self.rng))
            if context <= keep:
                break
        return [*ends, *waited], lanes_left

    def _sub_prefix_of(self) -> tuple[int, int, int]:
        """(ref, keep, prefix) of a sub-agent's first call: what the session's first one began with."""
        if self.first_sub < 0:
            return -1, 0, SUB_PREFIX
        return self.first_sub, min(self.sub_prefix, self.drafts[self.first_sub].blocks), -1

    def _lanes(self, sub: SubPart, calls: int, own: int) -> dict[int, list[int]]:
        """`calls` calls cut into lanes of geometric length; lengths by the own call that a lane begins at."""
        lanes: dict[int, list[int]] = {}
        place = -1
        while calls > 0:
            length = 1
            while self._chance(1 - 1 / sub.lane_calls_mean):
                length += 1
            if place < 0 or not self._chance(sub.lane_together_share):
                place = self.rng.randrange(own)
            lanes.setdefault(place, []).append(min(length, calls))
            calls -= length
        return lanes

    def _lane(self, sub: SubPart, style: _Style, length: int, own: int) -> int:
        if self.first_sub < 0 or self._chance(sub.lane_fork_share):
            fork = (own, self.drafts[own].blocks, self.drafts[own].blocks)
        else:
            ref, keep, _ = self._sub_prefix_of()
            fork = (ref, keep, max(keep, self._blocks(sub.first_tokens.draw(self.rng))))
        return self._chain(style, length, fork, self._ms(sub.lane_gap_s), own)
