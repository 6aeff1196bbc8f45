"""Tools that the policy calls: what a tool is, and a browser over a searched corpus."""

from trace_pl.tools.browser import Browser
from trace_pl.tools.corpus import Corpus, Document
from trace_pl.tools.environment import EnvironmentTools
from trace_pl.tools.functions import FunctionTools
from trace_pl.tools.guards import AllowAll, QueryGuard, SeenWordsGuard
from trace_pl.tools.index import Bm25Index, Hit, SearchIndex
from trace_pl.tools.protocol import Toolbox, ToolSession
from trace_pl.tools.stored_index import StoredBm25Index

__all__ = [
    "AllowAll",
    "Bm25Index",
    "Browser",
    "Corpus",
    "Document",
    "EnvironmentTools",
    "FunctionTools",
    "Hit",
    "QueryGuard",
    "SearchIndex",
    "SeenWordsGuard",
    "StoredBm25Index",
    "ToolSession",
    "Toolbox",
]
