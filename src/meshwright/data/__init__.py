"""From text files to global batches: corpus, tokenizer, cached tokens, order of samples, loader."""

from typing import TYPE_CHECKING

from meshwright.on_demand import on_demand

if TYPE_CHECKING:
    from meshwright.data.cache import Progress, open_tokens, token_cache
    from meshwright.data.corpus import find_files
    from meshwright.data.loader import GlobalBatchLoader, global_batch_loader, numbers_that_divide
    from meshwright.data.order import GlobalOrder, ShardedSampler, ShardedStream
    from meshwright.data.stream import RepeatedStream
    from meshwright.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, load_tokenizer
    from meshwright.data.tokens import TokenDataset
else:
    on_demand(
        __name__,
        """
        cache: Progress open_tokens token_cache
        corpus: find_files
        loader: GlobalBatchLoader global_batch_loader numbers_that_divide
        order: GlobalOrder ShardedSampler ShardedStream
        stream: RepeatedStream
        tokenizer: ByteTokenizer JsonTokenizer Tokenizer load_tokenizer
        tokens: TokenDataset
        """,
    )

__all__ = [
    "ByteTokenizer",
    "GlobalBatchLoader",
    "GlobalOrder",
    "JsonTokenizer",
    "Progress",
    "RepeatedStream",
    "ShardedSampler",
    "ShardedStream",
    "TokenDataset",
    "Tokenizer",
    "find_files",
    "global_batch_loader",
    "load_tokenizer",
    "numbers_that_divide",
    "open_tokens",
    "token_cache",
]
