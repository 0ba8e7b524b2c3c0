"""Cross entropies that save memory: in half precision, of a linear head without its logits, of split vocabularies."""

from typing import TYPE_CHECKING

from meshwright.runtime.lazy import lazy_exports

if TYPE_CHECKING:
    from meshwright.loss.fused import (
        FusedCrossEntropy as FusedCrossEntropy,
        fused_cross_entropy as fused_cross_entropy,
        next_token_loss as next_token_loss,
    )
    from meshwright.loss.lazy_logits import (
        HeadLogits as HeadLogits,
        LazyLogits as LazyLogits,
        VocabularyShards as VocabularyShards,
    )
    from meshwright.loss.linear_head import (
        LinearCrossEntropy as LinearCrossEntropy,
        linear_cross_entropy as linear_cross_entropy,
    )
    from meshwright.loss.vocabulary_parallel import (
        Vocabulary as Vocabulary,
        parallel_cross_entropy as parallel_cross_entropy,
    )
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
