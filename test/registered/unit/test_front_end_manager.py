"""The table of running requests: what is sent, what comes back, what is left behind."""

from __future__ import annotations

import asyncio

import pytest

from sglang.srt.managers import io_struct
from sglang.srt.managers.errors import RequestError
from sglang.srt.managers.front_end_config import FrontEndConfig
from sglang.srt.managers.io_struct import BatchTokenIDOutput, FinishReason, TokenOutput
from sglang.srt.managers.request_state import GenerateReqInput
from sglang.srt.managers.tokenizer import NoTokenizer, Tokenizer
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.front_end_case import write_front_end_model

register_cpu_ci(est_time=2, suite="unit")


class Outbox:
    """A link that keeps what was sent."""

    def __init__(self) -> None:
        self.sent: list = []

    def send(self, message) -> None:
        self.sent.append(message)

    def take(self, kind) -> list:
        found = [message for message in self.sent if isinstance(message, kind)]
        self.sent = [message for message in self.sent if not isinstance(message, kind)]
        return found


@pytest.fixture
def rig(tmp_path):
    """(manager, outbox) of a server that is ready for prompts of up to 20 tokens."""
    tokenizer = Tokenizer(write_front_end_model(tmp_path))
    return make(tokenizer)


def make(tokenizer, **changes):
    values = {
        "model_path": "m",
        "tokenizer_path": "m",
        "served_model_name": "m",
        "vocab_size": 280,
        "context_length": 100,
        "model_context_length": 200,
        "eos_token_ids": frozenset({256, 258}),
        "sampling_defaults": {"top_k": 20},
    }
    outbox = Outbox()
    manager = TokenizerManager(FrontEndConfig(**(values | changes)), tokenizer, outbox)
    manager.handle(io_struct.ReadyOutput({"max_req_input_len": 20, "max_running_requests": 2}))
    return manager, outbox


def request(rid="r", text="ab", **params):
    return GenerateReqInput(rid, SamplingParams(max_new_tokens=5, **params), text=text)


def output(rid, ids, finish=None):
    return BatchTokenIDOutput([TokenOutput(rid, ids, finish, 2, len(ids))])


@pytest.mark.parametrize(
    ("input_len", "model_length", "said", "unsaid"),
    [
        (20, 200, ("KV cache holds 21", "has 20", "--max-total-tokens"), "larger --context"),
        (99, 200, ("--context-length 100", "has 99", "a larger --context-length"), "KV cache"),
        (99, 100, ("--context-length 100", "has 99", "--allow-auto-truncate"), "larger --context"),
    ],
    ids=["pool", "context", "context-of-the-model"],
)
def test_a_long_prompt_hears_what_bounds_it(tmp_path, input_len, model_length, said, unsaid):
    """Catches a refusal that names the wrong limit, or a way out that the next start refuses."""
    tokenizer = Tokenizer(write_front_end_model(tmp_path))
    manager, outbox = make(tokenizer, model_context_length=model_length)
    manager.handle(io_struct.ReadyOutput({"max_req_input_len": input_len}))
    with pytest.raises(RequestError) as caught:
        asyncio.run(manager.start("r", [request("r", text="a" * (input_len + 1))]))
    message = caught.value.message
    assert caught.value.code == "context_length_exceeded" and not outbox.sent
    assert all(text in message for text in (f"{input_len + 1} tokens", *said))
    assert unsaid not in message


def test_nothing_is_sent_unless_all_is_well(rig):
    """Catches a list of which the good half runs although the request was refused."""
    manager, outbox = rig
    for bad in (
        [request("a"), request("b", text="")],
        [request("a"), request("a")],
        [request("a"), request("b", temperature=-1.0)],
        [request("a"), request("b", text="x" * 21)],
    ):
        with pytest.raises(RequestError):
            asyncio.run(manager.start("g", bad))
    assert outbox.sent == [] and manager.num_running == 0


def test_end_tokens_are_merged(rig):
    """Catches a model that runs past its end of turn, or a request's own stop that is lost."""
    manager, outbox = rig
    asyncio.run(manager.start("g", [request("a", stop_token_ids=[7]), request("b")]))
    asyncio.run(manager.start("h", [request("c", stop_token_ids=[7], ignore_eos=True)]))
    sent = outbox.take(io_struct.TokenizedGenerateReqInput)
    stops = [message.sampling_params.stop_token_ids for message in sent]
    assert stops == [[7, 256, 258], [256, 258], [7]]


@pytest.mark.parametrize(
    ("prompt", "asked", "sent"), [(2, 5, 5), (18, 5, 3), (20, 5, 1), (2, None, 19), (20, None, 1)]
)
def test_length_is_clipped_to_what_remains(rig, prompt, asked, sent):
    """Catches a limit that reaches past the pool (F90, F92)."""
    manager, outbox = rig
    params = SamplingParams(max_new_tokens=asked)
    obj = GenerateReqInput("r", params, input_ids=[97] * prompt)
    asyncio.run(manager.start("r", [obj]))
    (message,) = outbox.take(io_struct.TokenizedGenerateReqInput)
    assert message.sampling_params.max_new_tokens == sent


def test_leaving_a_group_aborts_what_runs(rig):
    """Catches finished requests that are aborted, and running ones that are not."""
    manager, outbox = rig

    async def main():
        with await manager.start("g", [request("a"), request("b")]):
            manager.handle(output("a", [97], FinishReason("length", 1)))

    asyncio.run(main())
    assert [abort.rid for abort in outbox.take(io_struct.AbortReq)] == ["b"]
    assert manager.num_running == 0
    manager.handle(output("b", [97]))  # late; must be ignored


def test_a_rid_can_be_used_again_at_once(rig):
    """Catches a retry under its router's request id that gets the end of the request it replaces."""
    manager, _ = rig

    async def main():
        with await manager.start("a", [request("a")]):
            pass
        with await manager.start("a", [request("a")]):
            pass
        group = await manager.start("a", [request("a")])
        for _ in range(2):
            manager.handle(output("a", [120]))
            manager.handle(
                output("a", [], FinishReason("abort", None, "the client went away", 499))
            )
        assert not group.is_done
        manager.handle(output("a", [97], FinishReason("length", 1)))
        return await group.finish()

    (state,) = asyncio.run(main())
    assert (state.output_ids, state.finish_reason.type) == ([97], "length")


def test_abort_finds_group_and_single_rids(rig):
    """Catches an abort that misses the sequences of an n > 1 request."""
    manager, outbox = rig
    asyncio.run(manager.start("g", [request("g-0"), request("g-1")]))
    manager.abort(rid="g")
    manager.abort(rid="g-1")
    manager.abort(rid="other")
    assert [abort.rid for abort in outbox.take(io_struct.AbortReq)] == ["g-0", "g-1", "g-1"]


def test_a_fault_in_one_request_stays_there(rig, monkeypatch):
    """Catches an exception that loses the outputs of all others in the batch."""
    manager, outbox = rig

    async def main():
        broken = await manager.start("a", [request("a")])
        other = await manager.start("b", [request("b")])

        def fail(*args):
            raise RuntimeError("bug")

        monkeypatch.setattr(broken.states[0].detokenizer, "push", fail)
        done = FinishReason("length", 1)
        items = output("a", [97]).items + output("b", [98], done).items
        manager.handle(BatchTokenIDOutput(items))
        (state,) = await other.finish()
        assert state.text == "b"
        with pytest.raises(RequestError) as caught:
            await broken.finish()
        assert caught.value.status == 500

    asyncio.run(main())
    assert [abort.rid for abort in outbox.take(io_struct.AbortReq)] == ["a"]
    assert manager.num_running == 0


def test_death_reaches_requests_and_calls(rig):
    """Catches a waiter that nobody wakes."""
    manager, _ = rig

    async def main():
        group = await manager.start("a", [request("a")])
        call = asyncio.ensure_future(manager.call(io_struct.FlushCacheReqInput, timeout_s=5))
        await asyncio.sleep(0)
        manager.fail_all(RequestError("gone", status=503))
        for wait in (group.finish(), call):
            with pytest.raises(RequestError, match="gone"):
                await wait
        with pytest.raises(RequestError, match="gone"):
            await manager.start("b", [request("b")])

    asyncio.run(main())


def test_call_without_an_answer_times_out(rig):
    """Catches a call that waits for ever, and an answer that arrives after it."""
    manager, outbox = rig
    with pytest.raises(RequestError, match="no answer within 0.01 s"):
        asyncio.run(manager.call(io_struct.FlushCacheReqInput, timeout_s=0.01))
    (late,) = outbox.take(io_struct.FlushCacheReqInput)
    manager.handle(io_struct.FlushCacheReqOutput(late.req_id, True))


def test_queue_limit(tmp_path):
    """Catches a bound that counts only running or only waiting requests."""
    manager, _ = make(Tokenizer(write_front_end_model(tmp_path)), max_queued_requests=1)
    for rid in "abc":
        asyncio.run(manager.start(rid, [request(rid)]))
    with pytest.raises(RequestError) as caught:
        asyncio.run(manager.start("d", [request("d")]))
    assert (caught.value.status, caught.value.code) == (503, "queue_full")


def test_without_a_tokenizer_ids_pass_and_text_is_refused():
    """Catches a server with --skip-tokenizer-init that needs text anyway."""
    manager, outbox = make(NoTokenizer())

    async def main():
        obj = GenerateReqInput("r", SamplingParams(max_new_tokens=2), input_ids=[1, 2])
        group = await manager.start("r", [obj])
        manager.handle(output("r", [5, 6], FinishReason("length", 2)))
        (state,) = await group.finish()
        assert (state.output_ids, state.text) == ([5, 6], "")
        with pytest.raises(RequestError, match="--skip-tokenizer-init"):
            await manager.start("s", [request("s")])

    asyncio.run(main())
    assert len(outbox.take(io_struct.TokenizedGenerateReqInput)) == 1


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
