"""Other systems' names and habits over the rooms below, which never import them."""

from typing import TYPE_CHECKING

from meshwright.runtime.lazy import lazy_exports

if TYPE_CHECKING:
    from meshwright.compat import atorch as atorch, bmtrain as bmtrain, colossalai as colossalai, fairseq as fairseq
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
