"""The scheduler and all below it in the test's own process, one step at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sglang.srt.arg_groups.pipeline import run_resolution_pipeline
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenIDOutput,
    FromScheduler,
    TokenizedGenerateReqInput,
    TokenOutput,
)
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler_builder import build_engine
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    LogitsOutput,
)
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.drafter import DraftBatch, Proposal

AcceptPlan = Callable[[Req, int], int]


class InProcessEngine:
    """Runs requests by calling ``Scheduler.step`` directly; outputs are collected per request."""

    def __init__(
        self,
        model_path: str,
        *,
        accept_plan: AcceptPlan | None = None,
        device_steps: bool | None = None,
        **server_args,
    ) -> None:
        options = {"device": "cpu", "max_total_tokens": 4096, "random_seed": 0} | server_args
        args = run_resolution_pipeline(ServerArgs(model_path=model_path, **options))
        self.outputs: dict[str, list[TokenOutput]] = {}
        self.messages: list[FromScheduler] = []
        self.built = build_engine(args, self._receive, device_steps=device_steps)
        self.scheduler = self.built.scheduler
        self.scripted: ScriptedDrafter | None = None
        if accept_plan is not None:
            self.scripted = ScriptedDrafter(self, accept_plan)
            self.built.worker.replace_drafter(self.scripted)
        self._next_id = 0

    def _receive(self, message: FromScheduler) -> None:
        self.messages.append(message)
        if isinstance(message, BatchTokenIDOutput):
            for item in message.items:
                self.outputs.setdefault(item.rid, []).append(item)

    def submit(self, input_ids: Sequence[int], *, rid: str | None = None, **sampling) -> str:
        """Queue one request; keyword arguments of TokenizedGenerateReqInput go there."""
        if rid is None:
            rid = f"r{self._next_id}"
            self._next_id += 1
        own = {
            key: sampling.pop(key)
            for key in ("return_logprob", "logprob_start_len", "top_logprobs_num", "priority")
            if key in sampling
        }
        params = SamplingParams(**({"temperature": 0.0} | sampling))
        params.normalize()
        params.verify(self.built.runner.model_config.vocab_size)
        self.scheduler.handle(
            TokenizedGenerateReqInput(
                rid=rid, input_ids=list(input_ids), sampling_params=params, **own
            )
        )
        return rid

    def abort(self, rid: str) -> None:
        self.scheduler.handle(AbortReq(rid=rid))

    def run(self, max_steps: int = 100_000) -> None:
        """Step until nothing is left; the pools must add up then."""
        for _ in range(max_steps):
            if self.scheduler.is_idle:
                self.scheduler.check_integrity()
                return
            self.scheduler.step()
        raise AssertionError(f"not idle after {max_steps} steps")

    def generate(self, prompts: Sequence[Sequence[int]], **sampling) -> list[list[int]]:
        """Run all prompts together and return their output ids."""
        rids = [self.submit(prompt, **sampling) for prompt in prompts]
        self.run()
        return [self.ids(rid) for rid in rids]

    def ids(self, rid: str) -> list[int]:
        return [token for item in self.outputs.get(rid, []) for token in item.new_token_ids]

    def last(self, rid: str) -> TokenOutput:
        return self.outputs[rid][-1]

    def state_tensors(self) -> dict[str, Tensor]:
        """The recurrent pool's persistent tensors (not copies)."""
        cache = self.built.pools.req_pool.mamba_pool.mamba_cache
        named = {f"conv{i}": t for i, t in enumerate(cache.conv)}
        return {"temporal": cache.temporal, **named}


class ScriptedDrafter:
    """Forces acceptance: drafts are the known continuation up to a planned position, then wrong.

    ``expected[rid]`` is prompt + output of an undisturbed run; ``accept_plan(req, step)`` says how
    many drafts of this step shall be accepted (0 .. D-1).
    """

    is_chain = True
    capture_hidden = CaptureHiddenMode.NULL
    capture_layer_ids: tuple[int, ...] = ()

    def __init__(self, engine: InProcessEngine, accept_plan: AcceptPlan) -> None:
        self._engine = engine
        self._accept_plan = accept_plan
        self.draft_token_num = engine.built.worker.draft_token_num
        self.expected: dict[str, list[int]] = {}
        self.seen: dict[int, int] = {}

    def propose(self, batch: DraftBatch) -> Proposal:
        by_row = {r.req_pool_idx: r for r in self._engine.scheduler.running}
        vocab = self._engine.built.runner.model_config.vocab_size
        width = self.draft_token_num - 1
        drafts = []
        for row, length in zip(batch.rows, batch.prefix_lens, strict=True):
            req = by_row[row]
            known = self.expected[req.rid][length + 1 : length + 1 + width]
            known = known + [0] * (width - len(known))
            right = self._accept_plan(req, req.spec_verify_ct)
            self.seen[right] = self.seen.get(right, 0) + 1
            drafts.append([t if i < right else (t + 1) % vocab for i, t in enumerate(known)])
        tokens = torch.tensor(drafts, dtype=torch.long).reshape(len(batch.rows), width)
        return Proposal(tokens=tokens)

    def after_prefill(self, fb: ForwardBatch, output: LogitsOutput, next_ids: Tensor) -> None:
        """Nothing to keep: the script knows what follows."""

    def after_verify(
        self, fb: ForwardBatch, output: LogitsOutput, targets: Tensor, num_correct: list[int]
    ) -> None:
        """Nothing to keep: the script knows what follows."""
