"""Ids to text, piece by piece: whole characters, held-back stop strings, clean ends."""

from __future__ import annotations

import random

import pytest

from sglang.srt.managers.detokenizer_manager import DetokenizerState
from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.managers.tokenizer import StreamDecoder, Tokenizer
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.front_end_case import IM_END, write_front_end_model

register_cpu_ci(est_time=3, suite="unit")

TEXT = "Grüße, 世界! 👩‍🚀 naïve\n\nEND of"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_front_end_model(tmp_path_factory.mktemp("model")))


def run(tokenizer, ids, finish, cuts, *, stops=(), no_trim=False, skip_special=True):
    """Push `ids` in pieces that end at `cuts`; return (joined deltas, full text)."""
    state = DetokenizerState(
        tokenizer.incremental_decoder(skip_special_tokens=skip_special),
        stop_strings=list(stops),
        no_stop_trim=no_trim,
    )
    deltas = []
    bounds = sorted({*cuts, len(ids)})
    for begin, end in zip([0, *bounds], bounds):
        state.push(ids[begin:end], finish if end == len(ids) else None)
        deltas.append(state.take_delta())
    return deltas, state.text


def test_text_is_the_librarys_own_decoding(tokenizer):
    """Catches a wrong byte alphabet: our decoder against the library on every byte and token."""
    ids = list(range(261)) + tokenizer.encode(TEXT)
    for skip in (True, False):
        assert tokenizer.decode(ids, skip) == tokenizer.backend.decode(
            ids, skip_special_tokens=skip
        )
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


@pytest.mark.parametrize("width", [1, 2, 3, 4, 8, 16])
def test_characters_are_sent_whole_at_every_width(tokenizer, width):
    """Catches a delta with half a character, and text lost between two deltas (F80)."""
    ids = tokenizer.encode(TEXT)
    cuts = range(width, len(ids), width)
    deltas, text = run(tokenizer, ids, FinishReason("length", len(ids)), cuts)
    assert "".join(deltas) == text == TEXT
    assert all("\ufffd" not in delta for delta in deltas)


def test_end_inside_a_character_is_the_same_in_both_modes(tokenizer):
    """Catches held bytes that are dropped, or doubled, when the output ends (F81)."""
    ids = tokenizer.encode("aé世")[:-1]
    finish = FinishReason("length", len(ids))
    whole, _ = run(tokenizer, ids, finish, [])
    pieces, text = run(tokenizer, ids, finish, range(1, len(ids)))
    assert "".join(pieces) == "".join(whole) == text == "aé\ufffd"


def test_stray_bytes_do_not_stop_the_stream(tokenizer):
    """Catches a decoder that waits for ever behind an invalid byte."""
    ids = [0xFF, *tokenizer.encode("ok"), 0x80, *tokenizer.encode("!")]
    deltas, text = run(tokenizer, ids, None, range(1, len(ids)))
    assert text == "\ufffdok\ufffd!"
    assert deltas[2] == "k"


@pytest.mark.parametrize("stop", ["E", "\n", "世", "END", "\n\nE", "👩‍🚀", "界! "])
@pytest.mark.parametrize("no_trim", [False, True], ids=["cut", "kept"])
def test_stop_string_is_cut_the_same_however_ids_arrive(tokenizer, stop, no_trim):
    """Catches a stop string, or a part of it, that leaks into a delta (F62, F63, F64)."""
    ids = tokenizer.encode(TEXT)
    count = next(n for n in range(1, len(ids) + 1) if stop in tokenizer.decode(ids[:n]))
    finish = FinishReason("stop", stop)
    at = TEXT.index(stop)
    want = TEXT[: at + len(stop)] if no_trim else TEXT[:at]
    for width in (1, 2, 3, 5, count):
        deltas, text = run(
            tokenizer,
            ids[:count],
            finish,
            range(width, count, width),
            stops=[stop],
            no_trim=no_trim,
        )
        assert "".join(deltas) == text == want


def test_text_after_the_stop_in_the_same_token_is_dropped(tokenizer):
    """Catches a cut at the end of the last token instead of at the stop."""

    class OneToken:
        def step(self, token_id: int) -> str:
            return {1: "ab\n", 2: "\n\ncd\n\n"}[token_id]

        def finish(self) -> str:
            return ""

    state = DetokenizerState(OneToken(), stop_strings=["\n\n"], no_stop_trim=False)
    state.push([1], None)
    assert state.take_delta() == "ab"
    state.push([2], FinishReason("stop", "\n\n"))
    assert state.text == "ab"


def test_held_text_is_sent_after_an_ordinary_end(tokenizer):
    """Catches held text that is lost when the request ends by length (F64)."""
    ids = tokenizer.encode("the EN")
    deltas, text = run(
        tokenizer, ids, FinishReason("length", len(ids)), range(1, len(ids)), stops=["END"]
    )
    assert "".join(deltas) == text == "the EN"
    early, _ = run(tokenizer, ids, None, [], stops=["END"])
    assert early == ["the "]


def test_random_cuts_and_stops_agree_with_one_piece(tokenizer):
    """Catches any dependence of the text on how ids arrive."""
    rng = random.Random(0)
    for _ in range(300):
        ids = [rng.choice(b"ab\n\xc3\xa9\xe4\xb8") for _ in range(rng.randint(1, 14))]
        stops = ["".join(rng.choice("ab\né") for _ in range(rng.randint(1, 3))) for _ in range(2)]
        matched = None
        for count in range(1, len(ids) + 1):
            text = tokenizer.decode(ids[:count])
            matched = next((stop for stop in stops if stop in text), None)
            if matched is not None:
                ids = ids[:count]
                break
        finish = FinishReason("stop", matched) if matched else FinishReason("length", len(ids))
        want, _ = run(tokenizer, ids, finish, [], stops=stops)
        cuts = [at for at in range(1, len(ids)) if rng.random() < 0.6]
        got, _ = run(tokenizer, ids, finish, cuts, stops=stops)
        assert "".join(got) == "".join(want)
        if matched:
            assert matched not in "".join(want)


@pytest.mark.parametrize("no_trim", [False, True])
def test_stop_token_shows_only_when_asked(tokenizer, no_trim):
    """Catches an end token's text in the answer."""
    ids = [*tokenizer.encode("hi"), IM_END]
    finish = FinishReason("stop", IM_END)
    _, text = run(tokenizer, ids, finish, [], no_trim=no_trim, skip_special=False)
    assert text == ("hi<|im_end|>" if no_trim else "hi")


def test_other_tokenizers_stream_through_the_library(tokenizer):
    """Catches a fallback decoder that disagrees with the byte-level one."""
    ids = tokenizer.encode(TEXT)
    decoder = StreamDecoder(tokenizer, True, [])
    text = "".join(decoder.step(i) for i in ids) + decoder.finish()
    assert text == TEXT


def test_truncation_in_the_file_is_not_used(tmp_path):
    """Catches prompts that are cut in silence because tokenizer.json says so."""
    model = write_front_end_model(tmp_path)
    backend = Tokenizer(model).backend
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(model / "tokenizer.json"))
    assert Tokenizer(model).encode("abcdef") == list(b"abcdef")


def test_missing_tokenizer_names_flag_and_way_out(tmp_path):
    """Catches a bare FileNotFoundError."""
    with pytest.raises(ValueError, match="--tokenizer-path .*tokenizer.json"):
        Tokenizer(tmp_path)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
