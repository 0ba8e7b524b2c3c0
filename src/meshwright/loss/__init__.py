"""Losses: BMTrain's cross entropy in half precision's memory, one that holds no logits, and the next token's."""

from meshwright.loss.fused_cross_entropy import FusedCrossEntropy, fused_cross_entropy
from meshwright.loss.head_logits import HeadLogits
from meshwright.loss.lazy_logits import LazyLogits
from meshwright.loss.linear_cross_entropy import LinearCrossEntropy, linear_cross_entropy
from meshwright.loss.next_token import next_token_loss
from meshwright.loss.parallel_cross_entropy import Vocabulary, parallel_cross_entropy
from meshwright.loss.vocabulary_shards import VocabularyShards

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
