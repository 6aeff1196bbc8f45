"""What the server imports from which the processes of tests are forked."""

import gc
import os

import torch
from parsed import parser

import callbacks  # noqa: F401
from trace_pl.engines.vllm.setup import import_vllm
from trace_pl.errors import ConfigError

before = dict(os.environ)
torch.set_num_threads(1)
try:
    vllm = import_vllm()
    vllm.EngineArgs, vllm.LLMEngine  # noqa: B018  (imported when they are first asked for)
except ConfigError:
    pass  # whoever needs it says so
os.environ.clear()
os.environ.update(before)
parser()  # what it reads of signatures is kept
gc.collect()
gc.freeze()  # what all share stays shared: the collector writes to what it visits
gc.unfreeze = lambda: None  # vLLM calls it where it ends, and collects
