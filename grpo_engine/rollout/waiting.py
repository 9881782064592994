"""Requests that wait for a place among the rows, those of one prompt together."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from grpo_engine.rollout.expected_lengths import ExpectedLengths
from grpo_engine.types import SampleRequest


@dataclass(frozen=True, slots=True)
class Entry:
    """Rows that start from the same tokens."""

    token_ids: tuple[int, ...]
    """What is prefilled: the prompt and, of a completion that goes on, its tokens so far."""
    requests: list[int]
    """Numbers of the requests, one row each."""
    place: int = 0
    """Tokens of the completion among `token_ids`."""


class Waiting:
    """A queue of entries: prompts in the order given or, with `lengths`, long expected completions first. Completions
    that were set aside come last."""

    def __init__(self, requests: Sequence[SampleRequest], lengths: ExpectedLengths | None) -> None:
        groups: dict[tuple[int, ...], list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(tuple(request.prompt_ids), []).append(number)
        prompts = list(groups)
        order = range(len(prompts)) if lengths is None else lengths.order(prompts)
        self._entries = deque(Entry(prompts[index], groups[prompts[index]]) for index in order)
        self.num_rows = len(requests)
        """Rows that wait, those set aside among them."""
        self.num_fresh = len(requests)
        """Rows that have not started."""

    def set_aside(self, token_ids: Sequence[int], request: int, place: int) -> None:
        """A completion that goes on when everything before it has started."""
        self._entries.append(Entry(tuple(token_ids), [request], place))
        self.num_rows += 1

    def take(self, free: int, least: int) -> list[Entry]:
        """Entries for at most `free` rows, shorter ones first; none while `least` of those that wait have no place.

        A group that is larger than what is free is divided where fewer than `least` rows would start otherwise."""
        if free < min(least, self.num_rows):
            return []
        taken: list[Entry] = []
        count = 0
        while self._entries and count < free:
            entry, room = self._entries[0], free - count
            if len(entry.requests) > room and count >= least:
                break
            self._entries.popleft()
            if len(entry.requests) > room:
                self._entries.appendleft(replace(entry, requests=entry.requests[room:]))
                entry = replace(entry, requests=entry.requests[:room])
            taken.append(entry)
            count += len(entry.requests)
            self.num_fresh -= len(entry.requests) if entry.place == 0 else 0
        self.num_rows -= count
        # Neighbours of about the same length are padded little.
        return sorted(taken, key=lambda entry: len(entry.token_ids))
