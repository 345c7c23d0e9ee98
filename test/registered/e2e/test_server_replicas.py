"""--dp-size: several schedulers behind one front end."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import time

import httpx
import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.front_end_case import FakeServer, is_alive, write_front_end_model

register_cpu_ci(est_time=40, suite="e2e")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_front_end_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model):
    with FakeServer(model, "--dp-size", "3", options={"step_s": 0.02}) as running:
        yield running.wait_ready()


def counts(server, name):
    return [state[name] for state in server.get("/server_info")["internal_states"]]


def ask(server, text, tokens, **body):
    body = {"prompt": text, "max_tokens": tokens, **body}
    return httpx.post(server.url + "/v1/completions", json=body, timeout=20)


def test_requests_at_once_are_spread_evenly(server):
    """Catches a replica that stays idle, a load that is never given back, or mixed-up answers."""
    before = counts(server, "requests")
    for _ in range(2):
        with concurrent.futures.ThreadPoolExecutor(9) as pool:
            texts = [chr(97 + at) * 2 for at in range(9)]
            replies = list(pool.map(lambda text: ask(server, text, 20), texts))
        answers = [reply.json()["choices"][0]["text"] for reply in replies]
        assert answers == [text * 10 for text in texts]
    after = counts(server, "requests")
    shares = [now - then for now, then in zip(after, before)]
    assert sum(shares) == 18 and max(shares) - min(shares) <= 2


def test_a_lonely_client_stays_where_its_prefix_is(server):
    """Catches turns of one conversation that wander over the replicas."""
    before = counts(server, "requests")
    for _ in range(4):
        ask(server, "ab", 2)
    shares = [now - then for now, then in zip(counts(server, "requests"), before)]
    assert sorted(shares) == [0, 0, 4]


def test_clients_that_leave_free_their_replica(server):
    """Catches an abort that goes to the wrong replica, or to none (F87)."""
    before = counts(server, "aborts")
    body = {"prompt": "ab", "max_tokens": 60, "n": 6, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=20) as reply:
        pieces = reply.iter_bytes()
        next(pieces)
        assert counts(server, "num_running") == [2, 2, 2]
    end = time.monotonic() + 5
    while sum(counts(server, "num_running")) and time.monotonic() < end:
        time.sleep(0.05)
    assert [now - then for now, then in zip(counts(server, "aborts"), before)] == [2, 2, 2]


def test_calls_go_to_all_and_come_back_once(server):
    """Catches a flush of one replica, and loads that routers read of one."""
    before = counts(server, "flushes")
    assert httpx.post(server.url + "/flush_cache", timeout=20).status_code == 200
    assert [now - then for now, then in zip(counts(server, "flushes"), before)] == [1, 1, 1]
    loads = server.get("/v1/loads")
    assert loads["dp_rank_count"] == 3
    assert [load["dp_rank"] for load in loads["loads"]] == [0, 1, 2]
    assert len(server.get("/get_load")) == 3
    info = server.get("/server_info")
    each = loads["loads"][0]["max_total_num_tokens"]
    assert info["max_total_num_tokens"] == 3 * each == 3 * 4096


def test_one_dead_replica_ends_the_server(model):
    """Catches requests that wait for a replica which is gone (F95)."""
    with FakeServer(model, "--dp-size", "2", options={"step_s": 0.02}) as server:
        server.wait_ready()
        children = server.children()
        assert len(children) == 2
        os.kill(children[1], signal.SIGKILL)
        assert server.process.wait(15) == 1
        assert "replica" in server.log()
        end = time.monotonic() + 5
        while is_alive(children[0]) and time.monotonic() < end:
            time.sleep(0.05)
        assert not is_alive(children[0])


def test_drain_ends_all(model):
    """Catches a replica that outlives an orderly end (F96)."""
    with FakeServer(model, "--dp-size", "2") as server:
        server.wait_ready()
        children = server.children()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(15) == 0
        assert not any(is_alive(child) for child in children)


def test_real_replicas_answer_alike():
    """Catches replicas that each plan with the whole host, or give another text."""
    flags = ("--dp-size", "2", "--max-total-tokens", "2048", "--speculative-algorithm", "NEXTN")
    with FakeServer("demo", *flags, module="sglang.launch_server") as server:
        server.wait_ready(90)
        body = {"temperature": 0, "ignore_eos": True}
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            jobs = pool.map(lambda _: ask(server, "The captain", 24, **body), range(4))
            texts = {reply.json()["choices"][0]["text"] for reply in jobs}
        assert len(texts) == 1
        assert all(count > 0 for count in counts(server, "spec_verify_ct"))
        assert server.get("/server_info")["max_total_num_tokens"] == 4096


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
