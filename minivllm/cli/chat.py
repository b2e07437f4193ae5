"""`minivllm chat`: a conversation in the terminal, streamed.

Owns the history and what happens to it: an answer stopped by Ctrl-C keeps what was said, and where
the conversation outgrows the context its oldest turns go, with a note. Never computes. Chapter 00.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any

from minivllm.cli.loading import Timing, load, prepare
from minivllm.cli.text import note, styled
from minivllm.outputs import RequestOutput
from minivllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minivllm.llm import LLM

HELP = "/reset forgets the conversation, /quit or Ctrl-D leaves, Ctrl-C stops an answer"


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    prepared = prepare(args)
    llm = load(prepared, Timing())
    if llm.get_tokenizer().chat_template is None:
        raise ValueError(f"model {prepared.name!r} has no chat template; use `minivllm generate`")
    with contextlib.suppress(ImportError):  # line editing and history in input(); not on Windows
        import readline  # noqa: F401
    session = Session(llm, prepared.params, args.system, args.chat_template_kwargs, args.timing)
    note(HELP)
    while (line := _read_line()) is not None:
        if not session.handle(line):
            break
    return 0


class Session:
    """One conversation: system message, turns, and the model that answers."""

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        system: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
        timing: bool = False,
    ) -> None:
        self.llm = llm
        self.params = params
        self.system = [{"role": "system", "content": system}] if system else []
        self.turns: list[dict[str, str]] = []  # user, assistant, user, ...
        self._template_kwargs = template_kwargs or {}
        self._timing = timing
        stats = llm.stats
        assert llm.config.max_model_len is not None
        self.context = min(llm.config.max_model_len, stats.num_blocks * stats.block_size)

    def handle(self, line: str) -> bool:
        """Take one line from the user; False where it asks to leave."""
        text = line.strip()
        if text in ("/quit", "/exit"):
            return False
        if text == "/reset":
            self.turns.clear()
            _say("the conversation is forgotten")
        elif text.startswith("/"):
            _say(HELP)
        elif text:
            self._ask(text)
        return True

    def _ask(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})
        try:
            prompt_ids = self._fit()
            answer = self._stream(prompt_ids)
        except ValueError as error:  # a message too long, or one that the template refuses
            self.turns.pop()
            _say(f"error: {error}")
            return
        if answer:
            self.turns.append({"role": "assistant", "content": answer})
        else:  # stopped before its first word: as if it had not been asked
            self.turns.pop()

    def _fit(self) -> list[int]:
        """Token ids of the conversation; drops the oldest turns until an answer has room.

        Room is what --max-tokens allows, but no more than a quarter of the context. Raises
        ValueError, with the history as it was, where the newest message alone is too long.
        """
        alone = len(self._encode(self.turns[-1:]))
        if alone >= self.context:  # before any turn is dropped for nothing
            raise ValueError(
                f"the message makes a prompt of {alone} tokens, and the context holds "
                f"{self.context}"
            )
        reserve = min(self.params.max_tokens or self.context, self.context // 4)
        ids, dropped = self._encode(self.turns), 0
        while len(ids) > self.context - reserve and len(self.turns) > 2:
            del self.turns[:2]  # a question with its answer: templates want them to alternate
            ids, dropped = self._encode(self.turns), dropped + 1
        if dropped:
            turns = "turn was" if dropped == 1 else f"{dropped} turns were"
            _say(f"the context of {self.context} tokens is full: the oldest {turns} dropped")
        return ids

    def _encode(self, turns: list[dict[str, str]]) -> list[int]:
        tokenizer = self.llm.get_tokenizer()
        return tokenizer.encode_chat([*self.system, *turns], **self._template_kwargs)

    def _stream(self, prompt_ids: list[int]) -> str:
        """Print the answer as it comes; returns all of it, or as much as Ctrl-C allowed."""
        pieces: list[str] = []
        started, num_tokens, last = time.perf_counter(), 0, None
        stream = self.llm.stream({"prompt_token_ids": prompt_ids}, self.params)
        try:
            for last in stream:
                sample = last.outputs[0]
                pieces.append(sample.text)
                num_tokens += len(sample.token_ids)
                print(sample.text, end="", flush=True)
            if last is not None and last.outputs[0].finish_reason == "length":
                print(styled(" [...]", "2"), end="")
        except KeyboardInterrupt:
            print(styled(" [stopped]", "2"), end="")
        finally:
            stream.close()  # type: ignore[attr-defined]  # aborts what is still running
        print(flush=True)
        if self._timing and last is not None:
            _say(_numbers(last, num_tokens, time.perf_counter() - started))
        return "".join(pieces).strip()


def _numbers(output: RequestOutput, num_tokens: int, seconds: float) -> str:
    first = output.metrics.time_to_first_token if output.metrics else None
    return (
        f"{num_tokens} tokens in {seconds:.1f} s ({num_tokens / seconds:.1f} tokens/s), first "
        f"after {first or 0:.2f} s; {output.num_cached_tokens} of "
        f"{len(output.prompt_token_ids)} prompt tokens from the prefix cache"
    )


def _read_line() -> str | None:
    """A line from the user; None at the end of input."""
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            return input(prompt)
        except EOFError:
            if prompt:
                print()  # the shell's prompt then starts on its own line
            return None
        except KeyboardInterrupt:
            print()
            _say("/quit or Ctrl-D leaves")


def _say(text: str) -> None:
    print(styled(f"({text})", "2"), flush=True)
