"""Arguments about the model, its files and its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.arg_groups.flag import flag, required_flag


@dataclass
class ModelFields:
    """Which model to serve and how to read it."""

    model_path: str = required_flag(
        "Directory of the checkpoint (config.json, *.safetensors, tokenizer.json), or the name of "
        "a bundled model: demo. Nothing is downloaded.",
        metavar="DIR",
    )
    tokenizer_path: str | None = flag(
        None, "Directory of the tokenizer.", metavar="DIR", auto="the model's directory"
    )
    skip_tokenizer_init: bool = flag(
        False, "Start without a tokenizer: requests carry input_ids and replies carry output ids."
    )
    trust_remote_code: bool = flag(
        False, "Accepted for old command lines: code from a checkpoint is never run."
    )
    load_format: str = flag(
        "auto",
        "How to get the weights: auto and safetensors read the checkpoint, dummy draws random "
        "weights of the right shapes (for speed and memory runs without a checkpoint).",
        choices=("auto", "safetensors", "dummy"),
    )
    dtype: str = flag(
        "auto",
        "Type of weights and activations on the device.",
        choices=("auto", "bfloat16", "float32", "float16"),
        auto="bfloat16 on a GPU, float32 on the CPU",
    )
    quantization: str | None = flag(
        None,
        "How the checkpoint's weights are quantized. Needed only to insist on a kind: the "
        "checkpoint's own config says it.",
        choices=("fp8",),
        auto="what config.json says",
    )
    context_length: int | None = flag(
        None,
        "Longest sequence (prompt and answer), in tokens.",
        minimum=2,
        auto="the model's max_position_embeddings",
    )
    served_model_name: str | None = flag(
        None,
        "Name of the model in /v1/models and in replies.",
        metavar="NAME",
        auto="the value of --model-path",
    )
    chat_template: str | None = flag(
        None,
        "File with a Jinja chat template.",
        metavar="FILE",
        auto="the one beside the tokenizer",
    )
    sampling_defaults: str = flag(
        "model",
        "Where sampling parameters come from that a request leaves out: the checkpoint's "
        "generation_config.json (model) or the OpenAI defaults (openai).",
        choices=("model", "openai"),
    )
    random_seed: int | None = flag(
        None,
        "Seed of everything random that no request seeds itself, and of dummy weights.",
        minimum=0,
        maximum=(1 << 63) - 1,
        metavar="N",
        auto="drawn at start and logged",
    )
