"""From sampled ids to what the user sees: text, stop strings, log-probabilities, outputs.

Owns the text side of every request. Never schedules: it says that a stop string was found and the
engine ends the sequence. Lesson 10.
"""

from __future__ import annotations

import time

from minivllm.detokenizer import IncrementalDetokenizer
from minivllm.engine.sequence import Sequence
from minivllm.engine.step_plan import TokenLogprobs
from minivllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from minivllm.tokenizer import Tokenizer


class SampleText:
    """Text of one sample as it grows, cut at the first stop string."""

    def __init__(self, seq: Sequence, tokenizer: Tokenizer | None) -> None:
        params = seq.params
        self.seq = seq
        self.text = ""
        self.stop_string: str | None = None
        self.logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.cumulative_logprob: float | None = None if params.logprobs is None else 0.0
        self.num_streamed = 0  # characters that `take_new_text` has given out
        self.num_streamed_ids = 0
        self._detokenizer = (
            IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
            if tokenizer is not None and params.detokenize
            else None
        )
        # A stop string can begin in text that was already shown; that much is held back.
        self._hold = max((len(stop) for stop in params.stop), default=1) - 1

    def append(self, token_id: int) -> bool:
        """Add a token; True where its text completes a stop string."""
        if self._detokenizer is None:
            return False
        return self._add(self._detokenizer.append([token_id]))

    def finish(self) -> bool:
        """The sequence has ended: add the text held back; True for a stop string in it."""
        if self._detokenizer is None or self.stop_string is not None:
            return False
        return self._add(self._detokenizer.flush())

    def take_new_text(self) -> str:
        """Text not given out yet, less what may still turn out to be part of a stop string."""
        end = len(self.text)
        if not self.seq.finished:
            end = max(self.num_streamed, end - self._hold)
        piece = self.text[self.num_streamed : end]
        self.num_streamed = end
        return piece

    def output(self) -> CompletionOutput:
        """All of the sample so far."""
        seq = self.seq
        return CompletionOutput(
            index=seq.sample_index,
            text=self.text,
            token_ids=seq.completion_ids,
            cumulative_logprob=self.cumulative_logprob,
            # A copy, as the ids are: an output must not grow in the hands of who has it.
            logprobs=None if self.logprobs is None else list(self.logprobs),
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
        )

    def take_delta(self) -> CompletionOutput:
        """What is new since the last call: text, token ids and log-probabilities."""
        output = self.output()
        output.text = self.take_new_text()
        output.token_ids = output.token_ids[self.num_streamed_ids :]
        if output.logprobs is not None:
            output.logprobs = output.logprobs[self.num_streamed_ids :]
        self.num_streamed_ids += len(output.token_ids)
        return output

    def _add(self, piece: str) -> bool:
        """Add final text; True where it, or what is pending behind it, completes a stop string."""
        assert self._detokenizer is not None
        if self.stop_string is not None:
            return False
        # Only matches that end in the new text are new: older text has been searched.
        search_from = max(len(self.text) - self._hold, 0)
        self.text += piece
        stops = self.seq.params.stop
        if not stops:
            return False
        # A line feed can be a byte token: final only once the next one is known, but seen here.
        visible = self.text + self._detokenizer.pending()
        found = [(at, stop) for stop in stops if (at := visible.find(stop, search_from)) >= 0]
        if not found:
            return False
        at, self.stop_string = min(found)
        kept = len(self.stop_string) if self.seq.params.include_stop_str_in_output else 0
        self.text = visible[: at + kept]
        return True


class RequestState:
    """One request: its samples and what has been found about its prompt."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_ids: list[int],
        sequences: list[Sequence],
        tokenizer: Tokenizer | None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_ids = prompt_ids
        self.samples = [SampleText(seq, tokenizer) for seq in sequences]
        self.metrics = RequestMetrics(arrival_time=time.perf_counter())
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = (
            [None] * len(prompt_ids) if sequences[0].wants_prompt_logprobs else None
        )
        self._tokenizer = tokenizer

    @property
    def finished(self) -> bool:
        """True once every sample has ended."""
        return all(sample.seq.finished for sample in self.samples)

    def add_token(self, seq: Sequence, logprobs: TokenLogprobs | None) -> str | None:
        """Take in the sequence's newest token; returns the stop string that it completes, if any.

        A token that ended the sequence by its id adds no text: its sample is complete without it.
        """
        if self.metrics.first_token_time is None:
            self.metrics.first_token_time = time.perf_counter()
        sample = self.samples[seq.sample_index]
        if logprobs is not None and sample.logprobs is not None:
            sample.logprobs.append(self._entry(logprobs))
            sample.cumulative_logprob = (sample.cumulative_logprob or 0.0) + logprobs.logprob
        stopped = False
        if seq.finish_reason != "stop" or seq.params.include_stop_str_in_output:
            stopped = sample.append(seq.token_ids[-1])
        if seq.finished and not stopped:
            stopped = sample.finish()
        return sample.stop_string if stopped else None

    def add_prompt_logprobs(self, start: int, found: list[TokenLogprobs]) -> None:
        """Log-probabilities of the prompt tokens from start + 1 on; recomputing repeats them."""
        assert self.prompt_logprobs is not None
        for offset, item in enumerate(found):
            self.prompt_logprobs[start + 1 + offset] = self._entry(item)

    def output(self, *, delta: bool = False) -> RequestOutput:
        """The request as it stands; with `delta`, only what is new in its samples."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_ids,
            outputs=[s.take_delta() if delta else s.output() for s in self.samples],
            finished=self.finished,
            num_cached_tokens=self.samples[0].seq.num_cached_tokens,
            prompt_logprobs=self.prompt_logprobs,
            metrics=self.metrics,
        )

    def _entry(self, item: TokenLogprobs) -> dict[int, Logprob]:
        """vLLM's form: the token itself first, then the most likely ones."""
        entry = {item.token_id: self._logprob(item.token_id, item.logprob, item.rank)}
        for rank, (token, value) in enumerate(zip(item.top_ids, item.top_logprobs, strict=True), 1):
            entry.setdefault(token, self._logprob(token, value, rank))
        return entry

    def _logprob(self, token: int, value: float, rank: int) -> Logprob:
        text = None if self._tokenizer is None else self._tokenizer.decode([token], False)
        return Logprob(value, rank, text)
