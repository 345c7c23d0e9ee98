"""Arguments about speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.arg_groups.flag import flag

MOST_VERIFY_ROWS = 256


@dataclass
class SpeculativeFields:
    """How drafts are made and accepted."""

    speculative_algorithm: str | None = flag(
        None,
        "How drafts are made. NEXTN (the same as EAGLE) uses the multi-token-prediction layer of "
        "the checkpoint.",
        choices=("EAGLE", "EAGLE3", "NEXTN", "NGRAM", "DFLASH", "DSPARK", "STANDALONE"),
        auto="no speculation",
    )
    speculative_draft_model_path: str | None = flag(
        None,
        "Directory of the draft model.",
        metavar="DIR",
        auto="the target's own draft layers",
    )
    speculative_draft_model_quantization: str | None = flag(
        None,
        "How the draft model's weights are quantized.",
        choices=("fp8",),
        auto="what its config.json says",
    )
    speculative_num_steps: int | None = flag(
        None,
        "Tokens that a chain drafts in one step, or the depth of a tree.",
        minimum=1,
        maximum=MOST_VERIFY_ROWS - 1,
        auto="3 (1 with DFLASH and DSPARK)",
    )
    speculative_eagle_topk: int | None = flag(
        None,
        "Candidates kept at each depth; 1 drafts a chain, more a tree.",
        minimum=1,
        maximum=MOST_VERIFY_ROWS,
        auto="1",
    )
    speculative_num_draft_tokens: int | None = flag(
        None,
        "Rows of one request in a verify step: its last token and the drafts. A chain always has "
        "one more than its steps.",
        minimum=2,
        maximum=MOST_VERIFY_ROWS,
        auto="steps + 1, or the block size of the draft checkpoint",
    )
    speculative_accept_threshold_single: float = flag(
        1.0,
        "Accept a draft whose probability under the target reaches this. Below 1 the output "
        "distribution changes.",
        minimum=0,
        maximum=1,
    )
    speculative_accept_threshold_acc: float = flag(
        1.0,
        "Divide the random number of the accept rule by this. Below 1 it accepts more and the "
        "output distribution changes.",
        above=0,
        maximum=1,
    )
    speculative_use_rejection_sampling: bool = flag(
        False, "Accept sampled drafts by their draft probabilities. Chains only; exact."
    )
    speculative_use_block_verification: bool = flag(
        False, "Accept sampled drafts of a chain jointly instead of one by one; exact."
    )
    speculative_dflash_block_size: int | None = flag(
        None,
        "Block size of a DFLASH drafter.",
        minimum=2,
        maximum=MOST_VERIFY_ROWS,
        auto="the draft checkpoint's, else 16",
    )
    speculative_dspark_block_size: int | None = flag(
        None,
        "Block size of a DSPARK drafter.",
        minimum=1,
        maximum=MOST_VERIFY_ROWS - 1,
        auto="the draft checkpoint's, else 7",
    )
    speculative_adaptive: bool = flag(
        False, "Choose the number of steps at run time from acceptance and batch size."
    )
    speculative_adaptive_config: str | None = flag(
        None,
        "JSON file with the candidate steps for each batch size.",
        metavar="FILE",
        auto="a built-in table",
    )
    speculative_ngram_min_bfs_breadth: int = flag(
        1, "Least breadth of the tree that NGRAM drafts.", minimum=1, maximum=MOST_VERIFY_ROWS
    )
    speculative_ngram_max_bfs_breadth: int = flag(
        10, "Greatest breadth of the tree that NGRAM drafts.", minimum=1, maximum=MOST_VERIFY_ROWS
    )
    speculative_ngram_match_type: str = flag(
        "BFS",
        "Which continuations NGRAM prefers: recent (BFS) or frequent (PROB) ones.",
        choices=("BFS", "PROB"),
    )
    speculative_ngram_max_trie_depth: int = flag(
        18, "Longest context that NGRAM looks up.", minimum=2, maximum=4096
    )
    speculative_ngram_capacity: int = flag(
        10_000_000,
        "Tokens that NGRAM keeps at most; each takes 20 bytes of host memory.",
        minimum=1,
        maximum=1_000_000_000,
    )

    @property
    def is_speculative(self) -> bool:
        """Whether an algorithm was chosen."""
        return self.speculative_algorithm is not None
