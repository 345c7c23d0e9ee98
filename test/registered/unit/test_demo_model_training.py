"""The training program of the demo model: exact forms, the smoke run, clear errors."""

import json
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from sglang.bundled import bundled_directory
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=30, suite="unit")

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from examples.demo_model import corpus as corpus_module  # noqa: E402
from examples.demo_model import export as export_module  # noqa: E402
from examples.demo_model.__main__ import main  # noqa: E402
from examples.demo_model.batches import TextWindows  # noqa: E402
from examples.demo_model.chat_data import Example, read_pairs  # noqa: E402
from examples.demo_model.config import SMOKE_PLAN  # noqa: E402
from examples.demo_model.drafters import build_drafter, predict  # noqa: E402
from examples.demo_model.errors import DemoModelError  # noqa: E402
from examples.demo_model.evaluate import walk  # noqa: E402
from examples.demo_model.extract import documents, is_prose  # noqa: E402
from examples.demo_model.gdn import (  # noqa: E402
    chunked_delta_rule,
    delta_rule_step,
    invert_unit_lower,
    l2_normalise,
)
from examples.demo_model.model import DemoModel  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _sentences(rng: random.Random, count: int) -> str:
    nouns = ("ship", "king", "table", "query", "garden", "letter", "server", "captain")
    verbs = ("finds", "reads", "writes", "keeps", "sees", "returns")
    sentence = "The {} {} the {} in the {}."
    return " ".join(
        sentence.format(rng.choice(nouns), rng.choice(verbs), rng.choice(nouns), rng.choice(nouns))
        for _ in range(count)
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small corpus with the bundled tokenizer."""
    directory = tmp_path_factory.mktemp("data")
    tokenizer = Tokenizer.from_file(str(bundled_directory("demo") / "tokenizer.json"))
    rng = random.Random(0)
    train = {name: [_sentences(rng, 60) for _ in range(6)] for name in ("austen", "python")}
    held_out = [_sentences(rng, 60) for _ in range(3)]
    examples = []
    for number in range(60):
        question = {"role": "user", "content": f"What is {number}?"}
        answer = {"role": "assistant", "content": "A number."}
        thinking = number % 2 == 0
        if thinking:
            answer["reasoning_content"] = "Easy."
        examples.append(Example([question, answer], thinking))
    corpus_module.write_tokens(directory, tokenizer, train, held_out, examples, {})
    return directory


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "out"
    assert main(_train_arguments(data, out)) == 0
    return out


def _train_arguments(data: Path, out: Path) -> list[str]:
    return ["train", "--data", str(data), "--out", str(out), "--smoke", "--device", "cpu"]


def _random_rule(length: int, alike: bool) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(1, 2, length, 16, generator=generator) for _ in range(3))
    if alike:  # keys that all point one way: the system of the chunk is at its worst
        k = k * 1e-3 + torch.ones(16)
    g = -torch.rand(1, 2, length, generator=generator) * (0.01 if alike else 1.0)
    beta = torch.rand(1, 2, length, generator=generator)
    return l2_normalise(q) / 4, l2_normalise(k), v, g, beta


@pytest.mark.parametrize("length", [1, 63, 64, 150])
@pytest.mark.parametrize("alike", [False, True])
def test_chunked_form_equals_the_recurrence(length: int, alike: bool) -> None:
    """Catches a decay of the wrong row, a lost chunk boundary, and cancellation in the inverse."""
    q, k, v, g, beta = _random_rule(length, alike)
    state = torch.zeros(1, 2, 16, 16)
    steps = [
        delta_rule_step(q[:, :, t], k[:, :, t], v[:, :, t], g[:, :, t], beta[:, :, t], state)
        for t in range(length)
    ]
    expected = torch.stack(steps, dim=2)
    chunked = chunked_delta_rule(q, k, v, g, beta, 64)
    assert (chunked - expected).norm() / expected.norm() < 1e-4
    if length > 1:
        wrong = chunked_delta_rule(q, k, v, g.roll(1, dims=-1) - 1.0, beta, 64)
        assert (wrong - expected).norm() / expected.norm() > 1e-2


def test_inverse_of_unit_lower() -> None:
    """Catches blocks joined in the wrong order."""
    strict = torch.randn(3, 64, 64, generator=torch.Generator().manual_seed(0)).tril(-1) * 0.3
    full = torch.eye(64, dtype=torch.float64) + strict.double()
    assert torch.allclose(
        invert_unit_lower(strict).double() @ full, torch.eye(64).double(), atol=1e-4
    )


def _model() -> DemoModel:
    torch.manual_seed(1)
    model = DemoModel(SMOKE_PLAN.target)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)
            elif parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.requires_grad_(False)


def test_generation_step_equals_the_forward_pass() -> None:
    """Catches a stale convolution window, a state in the wrong layout, a position off by one."""
    model = _model()
    ids = torch.randint(4000, (2, 70))
    whole = model.logits(model(ids).hidden)
    caches = model.new_caches(2, 70, CPU, torch.float32)
    stepped = torch.stack([model.step(ids[:, t], t, caches) for t in range(70)], dim=1)
    assert (stepped - whole).norm() / whole.norm() < 1e-4


def test_mtp_chain_equals_drafting_one_start_at_a_time() -> None:
    """Catches a chain that sees deeper keys of other starts, or keys after its start: the outputs of
    start ``t`` must not depend on what follows the tokens that the chain was given."""
    model = _model()
    ids = torch.randint(4000, (1, 30))
    hidden = model(ids).hidden
    chain = model.mtp_chain(hidden, ids, 3)
    for start in (0, 7, 25):
        cut = ids[:, : start + 4]  # tokens start+1 .. start+3 feed the chain
        alone = model.mtp_chain(hidden[:, : cut.shape[1]], torch.cat([cut, ids[:, :1]], 1), 3)
        for depth in range(3):
            error = (alone[depth][:, start] - chain[depth][:, start]).abs().max()
            assert error < 1e-4, (start, depth)
    changed = ids.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 4000
    other = model.mtp_chain(hidden, changed, 3)
    assert torch.equal(other[0][:, 7], chain[0][:, 7])  # start 7, depth 1 reads token 8 only
    assert not torch.equal(other[1][:, 7], chain[1][:, 7])


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_block_sees_its_context_and_no_more(kind: str) -> None:
    """Catches a block that sees features at or after its anchor, or another anchor's block."""
    model = _model()
    torch.manual_seed(2)
    drafter = build_drafter(SMOKE_PLAN.drafter_geometry(kind)).requires_grad_(False)
    ids = torch.randint(4000, (1, 40))
    taps = model(ids, drafter.geo.target_layer_ids).taps
    embed = model.model.embed_tokens

    def logits(taps: torch.Tensor, anchors: list[int]) -> torch.Tensor:
        return predict(drafter, embed, taps, ids, torch.tensor([anchors])).logits

    both = logits(taps, [9, 20])
    assert torch.allclose(logits(taps, [9])[:, 0], both[:, 0], atol=1e-5)
    later, before = taps.clone(), taps.clone()
    later[:, 9:] += 1.0
    before[:, 8] += 1.0
    assert torch.equal(logits(later, [9])[:, 0], logits(taps, [9])[:, 0])
    assert not torch.allclose(logits(before, [9])[:, 0], both[:, 0], atol=1e-5)


def test_walk_counts_steps_and_tokens() -> None:
    """Catches a step that advances by the accepted drafts without the target's own token."""
    accepted = [[-1, 2, 0, 0, 1, 0, 0, -1]]
    assert walk(accepted, [1], [8]).steps == 3  # 1 -> 4 -> 6 -> 7
    assert walk(accepted, [1], [8]).tokens == 6
    assert walk(accepted, [1], [4]).steps == 0  # the only step would leave the row


def test_smoke_run_exports_checkpoints_that_transformers_loads(trained: Path) -> None:
    """Catches an export whose names or config the format does not know."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        trained / "demo", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["mismatched_keys"]
    ours = export_module.load_target(SMOKE_PLAN.target, trained, CPU)
    ids = torch.arange(5, 105)[None]
    with torch.no_grad():
        reference, logits = model(ids).logits, ours.logits(ours(ids).hidden)
    assert (logits - reference).norm() / reference.norm() < 1e-4
    report = json.loads((trained / "report.json").read_text())
    assert set(report["acceptance"]["text"]) == {"mtp", "dflash", "dspark"}
    for name in ("demo", "demo-dflash", "demo-dspark"):
        assert "--smoke" in (trained / name / "README.md").read_text()


def test_same_seed_same_weights_and_resume(
    trained: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a run that is not reproducible, and a continued run that differs from a whole one."""
    stop = tmp_path / "out"
    original = export_module.torch.save
    saves = []

    def save_then_stop(state: dict, path: Path) -> None:
        original(state, path)
        saves.append(path)
        if len(saves) == 1:  # in the middle of pretraining
            raise KeyboardInterrupt

    monkeypatch.setattr("examples.demo_model.progress.torch.save", save_then_stop)
    assert main(_train_arguments(data, stop)) == 130
    assert not (stop / "demo").exists()
    saves.append(Path())
    assert main(_train_arguments(data, stop)) == 0
    for name in ("demo", "demo-dflash", "demo-dspark"):
        file = f"{name}/model.safetensors"
        assert (stop / file).read_bytes() == (trained / file).read_bytes(), name


def test_an_interrupted_export_leaves_nothing(
    trained: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a half-written checkpoint directory."""

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    model = export_module.load_target(SMOKE_PLAN.target, trained, CPU)
    monkeypatch.setattr(export_module, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        export_module.export_target(model, corpus_module.load(data), tmp_path)
    assert not list(tmp_path.iterdir())


def test_errors_say_what_to_do(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Catches a traceback in place of a message, and files left behind by a run that cannot start."""
    out = tmp_path / "out"
    assert main(_train_arguments(tmp_path / "none", out)) == 2
    assert "examples.demo_model corpus --data" in capsys.readouterr().err
    assert not out.exists()

    other = tmp_path / "other"
    other.mkdir()
    (other / "tokens").mkdir()
    for file in (data / "tokens").iterdir():
        (other / "tokens" / file.name).write_bytes(file.read_bytes())
    tokenizer_file = other / "tokens" / "tokenizer.json"
    tokenizer_file.write_text(tokenizer_file.read_text() + " ")
    assert main(_train_arguments(other, out)) == 2
    assert "is not the tokenizer that made the tokens" in capsys.readouterr().err

    assert main(["evaluate", *_train_arguments(data, out)[1:]]) == 2
    assert "train the models first" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["chat.bin", "held_out.bin", "train_austen.bin"])
def test_a_damaged_corpus_is_found_before_training(name: str, data: Path, tmp_path: Path) -> None:
    """Catches a file cut short that stops the run half-way, or that nobody notices."""
    copy = tmp_path / "data"
    shutil.copytree(data, copy)
    file = copy / "tokens" / name
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(DemoModelError, match=f"{name} is damaged; delete"):
        corpus_module.load(copy)
    file.unlink()
    with pytest.raises(DemoModelError, match=f"{name} is missing; delete"):
        corpus_module.load(copy)


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--scale", "0", "not a positive number"),
        ("--scale", "nan", "not a positive number"),
        ("--seed", "-1", "negative"),
        ("--device", "abacus", "--device abacus cannot be used here"),
        ("--out", "README.md", "is a file; give a directory"),
    ],
)
def test_bad_flags_are_named(
    flag: str,
    value: str,
    words: str,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches a traceback, and a run of no steps, in place of a message."""
    monkeypatch.chdir(Path(__file__).parents[3])
    try:
        status = main([*_train_arguments(data, tmp_path / "out"), flag, value])
    except SystemExit as stop:  # argparse
        status = stop.code
    assert status == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_progress_of_another_run_is_refused(
    trained: Path, data: Path, capsys: pytest.CaptureFixture
) -> None:
    """Catches weights of one seed continued under another."""
    assert main([*_train_arguments(data, trained), "--seed", "5"]) == 2
    assert "another plan, seed or tokenizer" in capsys.readouterr().err


def test_batches_depend_on_seed_and_step_alone(data: Path) -> None:
    """Catches a sampler with hidden state, which a resumed run would not have."""
    corpus = corpus_module.load(data)
    windows = TextWindows(corpus, 3)
    later = windows.batch(7, 4, 32)
    windows.batch(1, 4, 32)
    assert torch.equal(windows.batch(7, 4, 32), later)
    assert not torch.equal(windows.batch(8, 4, 32), later)
    assert not torch.equal(TextWindows(corpus, 4).batch(7, 4, 32), later)


def test_extraction(tmp_path: Path) -> None:
    """Catches code taken for prose, a heading that is lost between documents, and yaml quoting."""
    assert is_prose(
        "The planner chooses the cheapest plan that it finds for a query, in most cases."
    )
    assert not is_prose(
        "x = foo(1); y = bar[2] + {3: 4}; z = x ** y / 7; print(x, y, z, '%d' % 8)."
    )
    scene = (
        "# Play\n\n## ACT I\n\n### SCENE I. A room.\n\n**KING**  \n" + "Speak, my lord.  \n" * 40
    )
    (tmp_path / "play.md").write_text(
        scene + "\n### SCENE II. A hall.\n\n" + "Good night.  \n" * 40
    )
    found = list(documents("shakespeare", tmp_path))
    assert [name for name, _ in found] == ["shakespeare/play/1", "shakespeare/play/2"]
    assert found[0][1].startswith("SCENE I. A room.\n\nKING\nSpeak, my lord.\nSpeak")
    with pytest.raises(DemoModelError, match="ai.yml is missing"):
        read_pairs(tmp_path)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
