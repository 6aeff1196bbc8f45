"""The plan's activations against what the trainer's own forward and backward really hold."""

import pytest
import torch
from random_models import make_qwen3
from measured import LiveBytes, backward_peak, rows, saved_bytes
