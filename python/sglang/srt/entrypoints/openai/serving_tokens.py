"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from sglang.srt.entrypoints.front_end import FrontEnd
from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from sglang.srt.entrypoints.openai.serving_chat import ChatServing
from sglang.srt.managers.errors import RequestError


class TokenServing:
    """Text to ids and back, as the generation routes would do it."""

    def __init__(self, front_end: FrontEnd, chat: ChatServing) -> None:
        self._front = front_end
        self._chat = chat

    def tokenize(self, request: TokenizeRequest) -> dict[str, Any]:
        """`{tokens, count, max_model_len}`; lists for a list of prompts. Raises: RequestError."""
        max_model_len = self._front.max_model_len
        if (request.prompt is None) == (request.messages is None):
            raise RequestError("give exactly one of prompt and messages", param="prompt")
        if request.messages is not None:
            chat = ChatCompletionRequest(
                messages=request.messages,
                tools=request.tools,
                chat_template_kwargs=request.chat_template_kwargs,
                add_generation_prompt=request.add_generation_prompt,
            )
            text = self._chat.render(chat, request.tools or [])
            ids = self._encode(text, "messages", add_special_tokens=False)
            return {"tokens": ids, "count": len(ids), "max_model_len": max_model_len}
        if isinstance(request.prompt, list):
            lists = [
                self._encode(text, "prompt", add_special_tokens=request.add_special_tokens)
                for text in request.prompt
            ]
            counts = [len(ids) for ids in lists]
            return {"tokens": lists, "count": counts, "max_model_len": max_model_len}
        ids = self._encode(
            request.prompt or "", "prompt", add_special_tokens=request.add_special_tokens
        )
        return {"tokens": ids, "count": len(ids), "max_model_len": max_model_len}

    def _encode(self, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        try:
            return self._front.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except ValueError as error:
            raise RequestError(str(error), param=param) from error

    def detokenize(self, request: DetokenizeRequest) -> dict[str, Any]:
        """`{text}`; a list of texts for a list of lists. Raises: RequestError."""
        tokens = request.tokens
        if self._are_ids(tokens):
            return {"text": self._front.tokenizer.decode(tokens, request.skip_special_tokens)}
        if isinstance(tokens, list) and all(self._are_ids(ids) for ids in tokens):
            decode = self._front.tokenizer.decode
            return {"text": [decode(ids, request.skip_special_tokens) for ids in tokens]}
        raise RequestError(
            f"tokens must be a list of ids in [0, {self._front.config.vocab_size - 1}], or a list "
            "of such lists",
            param="tokens",
        )

    def _are_ids(self, value: Any) -> bool:
        size = self._front.config.vocab_size
        return isinstance(value, list) and all(
            type(item) is int and 0 <= item < size for item in value
        )
