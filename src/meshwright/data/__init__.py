"""Data from text files to global batches: corpus, tokenizer, cached tokens, order of samples, loader."""

from typing import TYPE_CHECKING

from meshwright.runtime.lazy import lazy_exports

if TYPE_CHECKING:
    from meshwright.data.chat import ChatEncoder as ChatEncoder, Tokens as Tokens
    from meshwright.data.loader import (
        GlobalBatchLoader as GlobalBatchLoader,
        ShardedSampler as ShardedSampler,
        ShardedStream as ShardedStream,
        global_batch_loader as global_batch_loader,
        numbers_that_divide as numbers_that_divide,
    )
    from meshwright.data.records import BadLines as BadLines, Record as Record, read_records as read_records
    from meshwright.data.sample_files import (
        SampleFiles as SampleFiles,
        SampleRows as SampleRows,
        pack as pack,
        sample_cache as sample_cache,
        trained_labels as trained_labels,
    )
    from meshwright.data.streams import (
        GlobalOrder as GlobalOrder,
        IndexOrder as IndexOrder,
        InterleavedShards as InterleavedShards,
        MixedOrder as MixedOrder,
        RepeatedStream as RepeatedStream,
    )
    from meshwright.data.token_files import (
        Progress as Progress,
        TokenDataset as TokenDataset,
        find_files as find_files,
        open_tokens as open_tokens,
        token_cache as token_cache,
    )
    from meshwright.data.tokenizer import (
        ByteTokenizer as ByteTokenizer,
        JsonTokenizer as JsonTokenizer,
        Tokenizer as Tokenizer,
        load_tokenizer as load_tokenizer,
    )
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
