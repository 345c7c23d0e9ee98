"""Environment variables: read each time, restored after an override, never usable as a value."""

from __future__ import annotations

import logging
import os

import pytest

from sglang.srt.environ import EnvBool, EnvField, EnvFloat, EnvInt, EnvStr, envs
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit")


class Fields:
    TEST_FLAG = EnvBool(False)
    TEST_COUNT = EnvInt(3)
    TEST_NAME = EnvStr(None)
    TEST_SHARE = EnvFloat(0.5)
    TEST_COMPUTED = EnvInt(lambda: 40 + 2)


@pytest.fixture(autouse=True)
def clean_environment():
    for field in vars(Fields).values():
        if isinstance(field, EnvField):
            field.clear()
    yield
    for field in vars(Fields).values():
        if isinstance(field, EnvField):
            field.clear()


@pytest.mark.parametrize("text", ["true", "1", "yes", "y", "TRUE", "Yes"])
def test_true_words(text, monkeypatch):
    monkeypatch.setenv("TEST_FLAG", text)
    assert Fields.TEST_FLAG.get() is True


@pytest.mark.parametrize("text", ["false", "0", "no", "n", "FALSE"])
def test_false_words(text, monkeypatch):
    monkeypatch.setenv("TEST_FLAG", text)
    assert Fields.TEST_FLAG.get() is False


def test_value_is_not_cached(monkeypatch):
    monkeypatch.setenv("TEST_COUNT", "5")
    assert Fields.TEST_COUNT.get() == 5
    monkeypatch.setenv("TEST_COUNT", "6")
    assert Fields.TEST_COUNT.get() == 6


@pytest.mark.parametrize(
    ("name", "text", "default"),
    [
        ("TEST_COUNT", "many", 3),
        ("TEST_FLAG", "maybe", False),
        ("TEST_SHARE", "nan", 0.5),
        ("TEST_SHARE", "half", 0.5),
    ],
)
def test_unreadable_text_warns_and_gives_the_default(name, text, default, monkeypatch, caplog):
    monkeypatch.setenv(name, text)
    with caplog.at_level(logging.WARNING):
        assert vars(Fields)[name].get() == default
    assert name in caplog.text and text in caplog.text


def test_callable_default():
    assert Fields.TEST_COMPUTED.get() == 42


def test_set_and_clear():
    Fields.TEST_COUNT.set(9)
    assert os.environ["TEST_COUNT"] == "9" and Fields.TEST_COUNT.is_set()
    Fields.TEST_COUNT.clear()
    assert Fields.TEST_COUNT.get() == 3 and not Fields.TEST_COUNT.is_set()


def test_override_restores_an_unset_variable():
    with Fields.TEST_COUNT.override(7):
        assert Fields.TEST_COUNT.get() == 7
    assert "TEST_COUNT" not in os.environ


def test_override_restores_when_the_body_raises(monkeypatch):
    monkeypatch.setenv("TEST_COUNT", "5")
    with pytest.raises(KeyError), Fields.TEST_COUNT.override(7):
        raise KeyError
    assert Fields.TEST_COUNT.get() == 5


def test_override_none_hides_the_default_and_the_environment(monkeypatch):
    monkeypatch.setenv("TEST_COUNT", "5")
    with Fields.TEST_COUNT.override(None):
        assert Fields.TEST_COUNT.get() is None
        assert Fields.TEST_COUNT.is_set()
        with Fields.TEST_COUNT.override(1):
            assert Fields.TEST_COUNT.get() == 1
        assert Fields.TEST_COUNT.get() is None
    assert Fields.TEST_COUNT.get() == 5


def test_a_field_is_no_value():
    with pytest.raises(RuntimeError, match=r"\.get\(\)"):
        bool(envs.SGLANG_ENABLE_PP_SPEC)
    with pytest.raises(RuntimeError, match=r"\.get\(\)"):
        len(envs.SGLANG_RAGGED_VERIFY_MODE)
    with pytest.raises(AttributeError, match=r"\.set\(\)"):
        envs.SGLANG_ENABLE_PP_SPEC = True


def test_documented_defaults():
    with envs.SGLANG_RAGGED_VERIFY_MODE.override("x"):
        pass
    for name, default in (
        ("SGLANG_ENABLE_PP_SPEC", False),
        ("SGLANG_RAGGED_VERIFY_MODE", "static"),
        ("SGLANG_MAMBA_SSM_DTYPE", None),
        ("SGLANG_MAMBA_CONV_DTYPE", "bfloat16"),
        ("SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK", False),
        ("SGLANG_DEBUG_MEMORY_POOL", False),
        ("SGLANG_TEST_MAX_RETRY", None),
        ("SGLANG_SIMULATE_ACC_LEN", -1.0),
    ):
        assert vars(type(envs))[name].default == default, name


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
