"""The public interface: `LLM(model).generate(...)`, with vLLM's names and defaults.

Owns the calls: input is checked whole before anything is queued, outputs come back in the order of
the prompts, and a call that fails leaves the engine empty and usable. Never schedules and never
computes. Lesson 00.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from minivllm.engine.build import Built, build_engine
from minivllm.engine.engine import collector_paused
from minivllm.engine.output_processor import RequestState
from minivllm.engine_config import EngineConfig
from minivllm.generation_config import default_sampling_params
from minivllm.hub import resolve_model
from minivllm.inputs import (
    CheckedPrompt,
    Limits,
    Prompt,
    as_prompt_list,
    check_params,
    check_prompts,
)
from minivllm.outputs import EngineStats, RequestOutput
from minivllm.progress import Progress
from minivllm.sampling_params import SamplingParams
from minivllm.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model and an engine over it.

    model: a directory as Hugging Face publishes it, "tiny", "smollm2", or a hub name. Options are
    the fields of `EngineConfig`; an unknown one is a TypeError. Calls are not re-entrant: a second
    thread, or a call inside an open `stream`, raises RuntimeError.
    """

    def __init__(self, model: str, **options: Any) -> None:
        config = EngineConfig.from_options(options)  # a misspelt option costs no model load
        self._path = resolve_model(model)
        built: Built = build_engine(self._path, config)
        self.config = built.config
        self.model_config = built.model_config
        self.engine = built.engine
        self.backend = built.backend
        self._tokenizer = built.tokenizer
        self._parts = built.parts
        manager = built.engine.scheduler.block_manager
        assert built.config.max_model_len is not None
        self._limits = Limits(
            vocab_size=built.model_config.vocab_size,
            max_model_len=built.config.max_model_len,
            kv_capacity=manager.num_blocks * manager.block_size,
        )
        self._seeds = random.Random(config.seed)
        self._next_request_id = 0
        self._busy = threading.Lock()

    # -- whole calls ------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete every prompt; one output a prompt, in their order.

        prompts: text, token ids, {"prompt": ...} or {"prompt_token_ids": ...}, one or a list.
        sampling_params: one for all, or one each; None takes the model's defaults.
        Raises ValueError or TypeError naming the prompt and the limit, with nothing queued.
        """
        with self._exclusive("generate"):
            checked, params = self._check(as_prompt_list(prompts), sampling_params)
            return self._run(checked, params, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the model's chat template."""
        tokenizer = self.get_tokenizer()
        if not messages:
            raise ValueError("messages is empty: a conversation has at least one message")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        prompts: list[Prompt] = []
        for conversation in conversations:
            text = tokenizer.render_chat(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                tools=tools,
                **(chat_template_kwargs or {}),
            )
            # The template has written the special tokens already: a second BOS changes answers.
            ids = tokenizer.encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Yield outputs whose text and token_ids are what is new, as it becomes final.

        The pieces of a sample, joined, are its text in `generate`. Leaving the loop aborts what is
        unfinished. Input is checked at the call, before the first step.
        """
        checked, params = self._check(as_prompt_list(prompts), sampling_params)
        return self._stream(checked, params)

    def _stream(
        self, prompts: list[CheckedPrompt], params: list[SamplingParams]
    ) -> Iterator[RequestOutput]:
        with self._exclusive("stream"):
            try:
                self._queue(prompts, params)
                while self.engine.has_unfinished:
                    for state in self.engine.step():
                        yield state.output(delta=True)
                self._check_parts_used()
            finally:
                self.engine.reset()

    def _run(
        self, prompts: list[CheckedPrompt], params: list[SamplingParams], use_tqdm: bool
    ) -> list[RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        try:
            request_ids = self._queue(prompts, params)
            progress = Progress(len(prompts), self.engine.stats, use_tqdm)
            with collector_paused(), progress:
                while self.engine.has_unfinished:
                    for state in self.engine.step():
                        if state.finished:
                            outputs[state.request_id] = state.output()
                            progress.request_done()
                    progress.step_done()
            if prompts:
                self._check_parts_used()
        finally:
            self.engine.reset()  # nothing to do after success
        return [outputs[request_id] for request_id in request_ids]

    # -- request by request -----------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue one prompt for `step`; returns its id. Raises as `generate` does."""
        with self._exclusive("add_request", alone=False):
            checked, params = self._check([prompt], sampling_params)
            if request_id is not None and request_id in self.engine.requests:
                raise ValueError(f"request_id {request_id!r} is in use")
            return self._queue(checked, params, request_id)[0]

    def step(self) -> list[RequestOutput]:
        """Run one engine step; returns the requests that got tokens, as they stand."""
        with self._exclusive("step", alone=False):
            return [state.output() for state in self.engine.step()]

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request; returns what it had, or None where it is not running."""
        with self._exclusive("abort", alone=False):
            state: RequestState | None = self.engine.abort(request_id)
            return None if state is None else state.output()

    def has_unfinished(self) -> bool:
        """True while `step` has something to do."""
        return self.engine.has_unfinished

    # -- state ------------------------------------------------------------------------------------

    @property
    def stats(self) -> EngineStats:
        """Counters and one record a step."""
        return self.engine.stats

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer; ValueError where the directory has none."""
        if self._tokenizer is None:
            raise ValueError(f"{self._path} has no tokenizer")
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """vLLM's defaults with what the model's generation_config.json says."""
        return default_sampling_params(self._path)

    def reset_prefix_cache(self) -> None:
        """Forget cached prompts: for measurements that must not profit from earlier ones."""
        with self._exclusive("reset_prefix_cache", alone=False):
            self.engine.scheduler.block_manager.reset()

    # -- inside -----------------------------------------------------------------------------------

    def _check(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> tuple[list[CheckedPrompt], list[SamplingParams]]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = check_params(sampling_params, len(prompts), self._limits)
        return check_prompts(prompts, self._tokenizer, self._limits), params

    def _queue(
        self,
        prompts: list[CheckedPrompt],
        params: list[SamplingParams],
        request_id: str | None = None,
    ) -> list[str]:
        request_ids = []
        for prompt, param in zip(prompts, params, strict=True):
            name = request_id
            while name is None or (request_id is None and name in self.engine.requests):
                name = str(self._next_request_id)
                self._next_request_id += 1
            # An unseeded request gets its seed here, once: a preempted one draws the same again.
            seed = self._seeds.getrandbits(64) if param.seed is None else param.seed
            self.engine.add_request(name, prompt.text, prompt.token_ids, param, seed)
            request_ids.append(name)
        return request_ids

    @contextmanager
    def _exclusive(self, what: str, alone: bool = True) -> Iterator[None]:
        """One call at a time; with `alone`, no request of `add_request` may be unfinished."""
        if not self._busy.acquire(blocking=False):
            raise RuntimeError(
                f"{what}() while another call of this LLM is running (another thread, or an open "
                "stream); close that first"
            )
        try:
            if alone and self.engine.requests:
                raise RuntimeError(
                    f"{what}() while {len(self.engine.requests)} requests of add_request() are "
                    "unfinished; step until they are done, or abort them"
                )
            if alone:
                self.engine.drain()  # steps in flight whose requests have ended or were aborted
            yield
        finally:
            self._busy.release()

    def _check_parts_used(self) -> None:
        unused = [name for name, part in self._parts.items() if part.calls == 0]
        if unused:
            raise RuntimeError(f"parts never reached by this model and engine: {unused}")
