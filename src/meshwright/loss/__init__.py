"""Losses: BMTrain's cross entropy in half precision's memory, one that holds no logits, and the next token's."""

from typing import TYPE_CHECKING

from meshwright.on_demand import on_demand

if TYPE_CHECKING:
    from meshwright.loss.fused_cross_entropy import FusedCrossEntropy, fused_cross_entropy
    from meshwright.loss.head_logits import HeadLogits
    from meshwright.loss.lazy_logits import LazyLogits
    from meshwright.loss.linear_cross_entropy import LinearCrossEntropy, linear_cross_entropy
    from meshwright.loss.next_token import next_token_loss
    from meshwright.loss.parallel_cross_entropy import Vocabulary, parallel_cross_entropy
    from meshwright.loss.vocabulary_shards import VocabularyShards
else:
    on_demand(
        __name__,
        """
        fused_cross_entropy: FusedCrossEntropy fused_cross_entropy
        head_logits: HeadLogits
        lazy_logits: LazyLogits
        linear_cross_entropy: LinearCrossEntropy linear_cross_entropy
        next_token: next_token_loss
        parallel_cross_entropy: Vocabulary parallel_cross_entropy
        vocabulary_shards: VocabularyShards
        """,
    )

__all__ = [
    "FusedCrossEntropy",
    "HeadLogits",
    "LazyLogits",
    "LinearCrossEntropy",
    "Vocabulary",
    "VocabularyShards",
    "fused_cross_entropy",
    "linear_cross_entropy",
    "next_token_loss",
    "parallel_cross_entropy",
]
