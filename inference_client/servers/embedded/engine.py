"""Continuous generation over any ``transformers`` causal language model, in a thread of its own.

Requests go in from any thread and come back as futures; between two decode steps the engine thread
takes new requests, commands (pause, weight update, abort) and hands out what is finished. For
laptops, tests and the demo, with vLLM's meanings throughout.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from easyrl.inference_client.servers.embedded.batch import RunningBatch
from easyrl.inference_client.servers.embedded.decode_check import (
    check_decoding,
    checked_decode_forward,
)
from easyrl.inference_client.servers.embedded.decode_masks import DecodeMasks
from easyrl.inference_client.servers.embedded.news import News
from easyrl.inference_client.servers.embedded.requests import (
    BadRequestError,
    GenerationRequest,
    Sequence,
    UnavailableError,
)
from easyrl.inference_client.servers.embedded.sampling import LogprobsMode, UniformStream
from easyrl.inference_client.servers.embedded.text import StopStrings
from easyrl.inference_client.servers.embedded.weights import ServedWeights
from easyrl.runtime.numerics import arithmetic, own_memory
from easyrl.runtime.shared_cores import SharedCores

PauseMode = Literal["abort", "wait", "keep"]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
DTYPES: dict[str, torch.dtype | str] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "auto": "auto",
}
T = TypeVar("T")
Refusal = BadRequestError | UnavailableError


class EmbeddedEngine:
    """Owns the model and the engine thread.

    Args:
        batch_invariant: each response is decoded by itself, its prompt prefilled by itself: nothing
            else that is asked can change a bit of it.

    Raises ``ValueError`` if ``model`` is not a directory with a model, or one that cannot be
    decoded as its own forward has it.
    """

    def __init__(
        self,
        model: Path,
        *,
        dtype: str = "auto",
        device: str = "cpu",
        max_num_seqs: int = 256,
        max_model_len: int | None = None,
        max_queue: int = 4096,
        logprobs_mode: LogprobsMode = "processed_logprobs",
        seed: int = 0,
        batch_invariant: bool = False,
        cores: SharedCores | None = None,
    ) -> None:
        self._cores = cores or SharedCores()
        self.news = News()  # of requests that have finished; to be added to in the engine's thread
        self._model = _load_model(model, dtype, device)
        self.tokenizer = load_tokenizer(model)
        self.vocab_size = int(self._model.config.get_text_config().vocab_size)
        self.max_model_len = _context_length(self._model, max_model_len)
        masks = _decode_masks(self._model, model, self.max_model_len)
        # joins parameters: before their memory is kept as what new weights are written into
        decode = checked_decode_forward(self._model, masks)
        self.max_num_seqs = max_num_seqs
        self.batch_invariant = batch_invariant
        # by other numbers of threads sums are taken in another order
        self.arithmetic = None if self._cores else arithmetic(device)
        self._eos_token_ids = _eos_token_ids(self._model, self.tokenizer)
        self.weights = ServedWeights(self._model, self._call, self._take_new_weights)
        self._batch = RunningBatch(
            self._model,
            max_num_seqs=1 if batch_invariant else max_num_seqs,
            max_model_len=self.max_model_len,
            raw_logprobs=logprobs_mode == "raw_logprobs",
            masks=masks,
            decode=decode,
        )
        self.stats = self._batch.stats
        self._max_queue = max_queue
        self._seeds = np.random.Generator(np.random.Philox(key=seed))
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[Sequence] = deque()
        self._owner: dict[Sequence, GenerationRequest] = {}
        self._pause_mode: PauseMode | None = None
        self._drained: list[Future[None]] = []  # of pauses that wait for the running ones
        self._failure: BaseException | None = None
        self._closing = False
        self._lock = threading.Lock()  # of num_waiting and of being open
        self.num_waiting = 0  # samples
        self._thread = threading.Thread(target=self._run, name="embedded-engine", daemon=True)
        self._thread.start()

    # --- called from any thread ---

    @property
    def is_alive(self) -> bool:
        return self._failure is None and not self._closing

    @property
    def num_running(self) -> int:
        return self._batch.num_admitted

    def submit(self, request: GenerationRequest) -> Future[list[Sequence]]:
        """Queues a request.

        Raises ``BadRequestError`` if it can never be served and ``UnavailableError`` if the queue
        is full or the engine has stopped.
        """
        if refused := self.submit_together([request]):
            raise refused[0]
        return request.future

    def submit_together(self, requests: list[GenerationRequest]) -> dict[int, Refusal]:
        """Queues those of ``requests`` that it takes; gives why it does not take others, by index.

        They begin to be decoded in one step, if there is room for all.
        """
        refused: dict[int, Refusal] = {}
        taken: list[GenerationRequest] = []
        problems: dict[tuple[int, int], BadRequestError | None] = {}  # by what samples share
        for request in requests:
            key = id(request.prompt), id(request.params)
            if key not in problems:
                problems[key] = self._problem(request)
        with self._lock:
            for index, request in enumerate(requests):
                problem = problems[id(request.prompt), id(request.params)] or self._lack(request)
                if problem is not None:
                    refused[index] = problem
                    continue
                self.num_waiting += request.params.n
                request.future.set_running_or_notify_cancel()  # ends by abort(), not by cancel()
                taken.append(request)
            if taken:
                self._inbox.put(lambda: self._enqueue(taken))
        return refused

    def abort(self, request: GenerationRequest) -> None:
        """Ends a request with what it has; nothing happens if it is finished."""
        self._call(lambda: self._abort([s for s in request.sequences if s in self._owner]))

    def abort_ids(self, request_ids: list[str]) -> Future[int]:
        """Ends the requests of these ids, all requests if there are none; gives their number."""
        ids = set(request_ids)

        def run() -> int:
            chosen = {
                sequence: request
                for sequence, request in self._owner.items()
                if not ids or request.request_id in ids
            }
            self._abort(list(chosen))
            return len(set(chosen.values()))

        return self._call(run)

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stops generation between two tokens; new requests wait until ``resume``.

        ``abort`` ends all requests with what they have, ``wait`` lets the running ones finish (the
        future is done when they are), ``keep`` freezes them.
        """
        drained: Future[None] = Future()
        drained.set_running_or_notify_cancel()

        def run() -> None:
            self._pause_mode = mode
            if mode == "keep":
                drained.set_result(None)
                return
            self._drained.append(drained)
            if mode == "abort":
                self._abort(list(self._owner))
            self._report_drained()

        self._put(run)
        return drained

    def resume(self) -> Future[None]:
        def run() -> None:
            self._pause_mode = None

        return self._call(run)

    def is_paused(self) -> Future[bool]:
        return self._call(lambda: self._pause_mode is not None)

    def set_weight_version(self, version: str) -> Future[None]:
        def run() -> None:
            self.weights.version = version
            self._batch.stamp(version)

        return self._call(run)

    def weight_version(self) -> Future[str]:
        return self._call(lambda: self.weights.version)

    def reset_prefix_cache(self) -> Future[None]:
        return self._call(self._batch.forget_prefixes)

    def close(self) -> None:
        """Ends all requests as aborted and the thread; to be called once."""
        with self._lock:
            self._closing = True
            self._inbox.put(lambda: None)  # wakes the thread
        self._thread.join()
        self.weights.close()

    def _call(self, function: Callable[[], T]) -> Future[T]:
        """Runs ``function`` in the engine thread between two steps."""
        future: Future[T] = Future()
        # a client that hangs up cancels its wait, not the command
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                result = function()
            except ValueError as error:  # the caller's mistake; anything else ends the engine
                future.set_exception(error)
            else:
                future.set_result(result)

        self._put(run)
        return future

    def _put(self, run: Callable[[], None]) -> None:
        with self._lock:
            if (ended := self._end_of_service()) is not None:
                raise ended
            self._inbox.put(run)

    def _end_of_service(self) -> UnavailableError | None:
        if self._failure is not None:
            return UnavailableError(f"the engine has failed: {self._failure!r}")
        return UnavailableError("the engine is shutting down") if self._closing else None

    def _lack(self, request: GenerationRequest) -> UnavailableError | None:
        """Why it cannot be queued now."""
        if (ended := self._end_of_service()) is not None:
            return ended
        if self.num_waiting + request.params.n <= self._max_queue:
            return None
        return UnavailableError(
            f"{self.num_waiting} samples are waiting, the queue holds {self._max_queue} "
            "(--max-queue); try again later"
        )

    def _problem(self, request: GenerationRequest) -> BadRequestError | None:
        """Why it can never be served."""
        prompt, params = request.prompt, request.params
        if len(prompt) == 0:
            return BadRequestError("prompt", "must not be empty")
        if len(prompt) + params.max_tokens > self.max_model_len:
            return BadRequestError(
                "max_tokens",
                f"{len(prompt)} prompt tokens and max_tokens={params.max_tokens} exceed the "
                f"maximum model length of {self.max_model_len} tokens; shorten one or raise "
                "--max-model-len",
            )
        if prompt.min() < 0 or prompt.max() >= self.vocab_size:
            return BadRequestError(
                "prompt", f"token id out of vocabulary, ids are 0 to {self.vocab_size - 1}"
            )
        if params.n > self.max_num_seqs:
            return BadRequestError(
                "n", f"must be at most max_num_seqs ({self.max_num_seqs}), is {params.n}"
            )
        if params.stop and self.tokenizer is None:
            return BadRequestError("stop", "stop strings need a tokenizer, the model has none")
        return None

    # --- called in the engine thread ---

    @torch.inference_mode()
    def _run(self) -> None:
        try:
            while not self._closing:
                self._take_inbox()
                if self._closing or not self._can_generate:
                    continue
                if self.weights.broken is None:
                    self._work()
                else:
                    self._fail_requests(f"{self.weights.broken}; send a complete one")
                    self._abort(list(self._owner))
        except BaseException as error:  # whoever waits for a future must hear of it
            self._failure = error
            raise
        finally:
            self._end_everything()

    @property
    def _can_admit(self) -> bool:
        return bool(self._waiting) and self._pause_mode is None and self._batch.num_free > 0

    @property
    def _can_generate(self) -> bool:
        is_held = self._pause_mode == "keep" or self.weights.update_is_open
        return not is_held and (self._batch.num_admitted > 0 or self._can_admit)

    def _take_inbox(self) -> None:
        """Runs what has come in; waits for something if there is nothing else to do."""
        self.news.tell()  # of the step before, or of what came in before
        if not self._can_generate:
            self._cores.rest()
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()
        self.news.tell()  # before a step that takes its time

    def _work(self) -> None:
        start_s = time.perf_counter()
        self._cores.take()
        if self._can_admit:
            count = min(len(self._waiting), self._batch.num_free)
            sequences = [self._waiting.popleft() for _ in range(count)]
            with self._lock:
                self.num_waiting -= count
            self._batch.add(sequences, self.weights.version)
        finished = self._batch.step()
        self.stats.busy_s += time.perf_counter() - start_s
        for sequence in finished:
            self._finish(sequence)
        self._report_drained()

    def _enqueue(self, requests: list[GenerationRequest]) -> None:
        for request in requests:
            self._open(request)

    def _open(self, request: GenerationRequest) -> None:
        params, eos = request.params, self._eos_token_ids
        seed = params.seed if request.seed is None else request.seed
        if seed is None:
            seed = int(self._seeds.integers(2**63))
        heeded = () if params.ignore_eos else eos
        request.num_running = params.n
        for index in range(params.n):
            sequence = Sequence(
                prompt=request.prompt,
                params=params,
                uniforms=UniformStream(seed, index),
                eos_token_id=heeded[0] if heeded else None,
                stop_token_ids=tuple(dict.fromkeys((*heeded, *params.stop_token_ids))),
                forbidden_early=(*eos, *params.stop_token_ids) if params.min_tokens else (),
                stop_strings=StopStrings(self.tokenizer, params)
                if params.stop and self.tokenizer
                else None,
            )
            request.sequences.append(sequence)
            self._owner[sequence] = request
            self._waiting.append(sequence)

    def _take_new_weights(self) -> None:
        """No prompt's keys and values are copied from now on that older weights made."""
        self._batch.forget_prefixes()
        self._batch.stamp(self.weights.version)

    def _abort(self, sequences: list[Sequence]) -> None:
        waiting = set(sequences).intersection(self._waiting)
        self._waiting = deque(s for s in self._waiting if s not in waiting)
        with self._lock:
            self.num_waiting -= len(waiting)
        self._batch.remove([sequence for sequence in sequences if sequence not in waiting])
        for sequence in sequences:
            sequence.finish_reason = "abort"
            self._finish(sequence)
        self._report_drained()

    def _finish(self, sequence: Sequence) -> None:
        request = self._owner.pop(sequence)
        request.num_running -= 1
        if request.num_running == 0 and not request.future.done():
            self.stats.finished_requests += 1
            request.future.set_result(request.sequences)

    def _report_drained(self) -> None:
        """Ends the pauses that waited for the running sequences, if there are none any more."""
        if self._batch.num_admitted == 0:
            for drained in self._drained:
                drained.set_result(None)
            self._drained.clear()

    def _fail_requests(self, why: str) -> None:
        """Whoever wants tokens now gets an error."""
        for request in set(self._owner.values()):
            request.future.set_exception(UnavailableError(why))

    def _end_everything(self) -> None:
        with self._lock:
            self._closing = True  # from here on nothing comes in
        while not self._inbox.empty():
            self._inbox.get()()
        if self._failure is None:
            self._abort(list(self._owner))
        else:
            self._fail_requests(f"engine failed: {self._failure!r}")
        for drained in self._drained:
            drained.set_result(None)
        self.news.tell()


def _load_model(path: Path, dtype: str, device: str) -> PreTrainedModel:
    """The model in ``path``, for inference only.

    Raises ``ValueError`` if there is none.
    """
    if not (path / "config.json").is_file():
        raise ValueError(
            f"{path}: not a model directory, config.json is missing; give the folder of a Hugging "
            "Face model"
        )
    if dtype not in DTYPES:
        raise ValueError(f"dtype: must be one of {', '.join(DTYPES)}, is {dtype!r}")
    try:
        model = _from_pretrained(path, DTYPES[dtype])
    except (OSError, SafetensorError) as error:
        remedy = "fetch the model again (hf download NAME --local-dir DIR), with all of its files"
        raise ValueError(f"{path}: {error}; {remedy}") from error
    model.requires_grad_(False).eval()
    own_memory(model)
    return model.to(torch.device(device))  # type: ignore[arg-type]


def _from_pretrained(path: Path, dtype: torch.dtype | str) -> PreTrainedModel:
    """With fused attention where the model has it (soft caps and sinks have none)."""
    load = partial(AutoModelForCausalLM.from_pretrained, path, dtype=dtype, local_files_only=True)
    try:
        return load(attn_implementation="sdpa")
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        return load(attn_implementation="eager")


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer beside a model; None if there is none."""
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        return None
    return AutoTokenizer.from_pretrained(path, local_files_only=True)


def _context_length(model: PreTrainedModel, wanted: int | None) -> int:
    limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if wanted is None:
        if limit is None:  # ALiBi
            raise ValueError(
                "max_model_len: the model's config.json names no longest sequence "
                "(max_position_embeddings); pass --max-model-len"
            )
        return limit
    if wanted < 2 or (limit is not None and wanted > limit):
        most = "" if limit is None else f" to the model's {limit}"
        raise ValueError(f"max_model_len: must be from 2{most}, is {wanted}")
    return wanted


def _decode_masks(model: PreTrainedModel, path: Path, max_model_len: int) -> DecodeMasks:
    """Raises ``ValueError`` if the model cannot be decoded as its own forward has it."""
    try:
        masks = DecodeMasks.of(model.config.get_text_config().to_dict(), max_model_len)
        check_decoding(model, masks)
    except ValueError as error:
        raise ValueError(
            f"{path}: a {type(model).__name__} is not served by the embedded server: {error}; "
            "serve it with vLLM (docs/endpoints.md)"
        ) from error
    return masks


def _eos_token_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[int, ...]:
    """Of tokenizer, config and generation config; the first is the primary one, as in vLLM."""
    found: list[int] = []
    for source in (tokenizer, model.config.get_text_config(), model.generation_config):
        ids = None if source is None else source.eos_token_id
        found += [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
    return tuple(dict.fromkeys(found))
