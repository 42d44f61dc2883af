"""The arriving sequences of a scheduler: those whose sources fill their blocks."""

from __future__ import annotations

from bisect import bisect_right

from dynamo.inference.sequence import EngineSequence


def admission_order(sequence: EngineSequence) -> tuple[int, int]:
    """Sort key of waiting sequences: the higher priority first, then the earlier arrival."""
    return -sequence.priority, sequence.arrival


def running_order(sequence: EngineSequence) -> int:
    """Sort key of running sequences: the higher priority first. Insertion keeps the admission
    order."""
    return -sequence.priority


class ArrivalQueue:
    """Sequences from their admission until they run or release their blocks.

    - `sequences`: all of them. Their sources may write into their blocks.
    - `new`: sequences whose sources are to be started. The engine takes them.
    - `preempted`: sequences whose sources are to be stopped. `end` then lets them wait again.
    - `arrived`: sequences whose sources have ended, which run from the next step on.
    """

    def __init__(self, block_tokens: int) -> None:
        self.sequences: list[EngineSequence] = []
        self.new: list[EngineSequence] = []
        self.preempted: list[EngineSequence] = []
        self.arrived: list[EngineSequence] = []
        self._block_tokens = block_tokens
        self._prompts: dict[int, EngineSequence] = {}
        self._loading: dict[int, EngineSequence] = {}

    def __len__(self) -> int:
        return len(self.sequences)

    def add(self, sequence: EngineSequence, *, prefix_caching: bool) -> None:
        """Add a sequence that was just admitted."""
        self.sequences.append(sequence)
        self.new.append(sequence)
        full = (sequence.length - 1) // self._block_tokens
        if full and prefix_caching and sequence.max_length > sequence.length + 1:
            self._prompts[sequence.content.hashes[full - 1]] = sequence
        for block in sequence.sources[0].loads:
            self._loading.setdefault(sequence.content.hashes[block], sequence)

    def has_prompt(self, sequence: EngineSequence, full: int) -> bool:
        """Whether the prompt of another sequence arrives, whose `full` blocks will be hits."""
        return full > 0 and sequence.content.hashes[full - 1] in self._prompts

    def is_loading(self, block_hash: int) -> bool:
        """Whether a sequence loads this block from a tier, so that others will find it cached."""
        return block_hash in self._loading

    def preempt_below(self, priority: int) -> bool:
        """Preempt the last sequence if its priority is lower than `priority`."""
        last = max(self.sequences, key=admission_order, default=None)
        if last is None or last.priority >= priority:
            return False
        self.preempted.append(last)
        return True

    def end(self, sequence: EngineSequence) -> bool:
        """Note that a source has ended. Returns False if the sequence has to release its blocks,
        because it ended or was preempted. A preempted one keeps its source, unless the first token
        of the answer is there already."""
        for key in [key for key, other in self._prompts.items() if other is sequence]:
            del self._prompts[key]
        for source in sequence.sources:
            for block in source.loads:
                if self._loading.get(key := sequence.content.hashes[block]) is sequence:
                    del self._loading[key]
        preempted = sequence in self.preempted
        if preempted:
            self.preempted.remove(sequence)
        if not (preempted and sequence.length == sequence.prompt_tokens):
            sequence.sources = ()
        if preempted or sequence.ended:
            self.sequences.remove(sequence)
            return False
        self.arrived.append(sequence)
        return True

    def remove_arrived(self, sequence: EngineSequence) -> None:
        """Remove a sequence that has arrived and ended before it ran."""
        self.arrived.remove(sequence)
        self.sequences.remove(sequence)

    def move_arrived(self, running: list[EngineSequence]) -> list[EngineSequence]:
        """Move the sequences whose arrival has ended to `running` and return them. An answer that
        was begun goes before prompts of its priority, which could use up the budget of many
        steps."""
        arrived, self.arrived = self.arrived, []
        for sequence in arrived:
            self.sequences.remove(sequence)
            sequence.computed_tokens = min(sequence.computed_tokens, sequence.length - 1)
            at = bisect_right(running, running_order(sequence), key=running_order)
            if sequence.computed_tokens >= sequence.prompt_tokens:
                while at and _is_prompt(running[at - 1], sequence.priority):
                    at -= 1
            running.insert(at, sequence)
        return arrived


def _is_prompt(sequence: EngineSequence, priority: int) -> bool:
    """Whether a running sequence of this priority computes more than the last known token."""
    return sequence.priority == priority and sequence.length - sequence.computed_tokens > 1
