"""Rows are read where the tokens are, wherever their masks were made."""

from types import SimpleNamespace

import torch

from trace_pl.models.packed_attention import BranchBlock, PackedRow
from trace_pl.models.packed_forward import read_rows


def test_masks_that_were_made_in_main_memory_go_to_the_device_of_the_tokens():
    # FSDP hands a model that was offloaded its tokens on the device, and does not look into rows.
    seen = []

    def decoder(input_ids, packed_rows, **settings):
        seen.extend(block.mask_QK.device for row in packed_rows for block in row.blocks)
        hidden = torch.zeros(*input_ids.shape, 4, device=input_ids.device)
        return SimpleNamespace(last_hidden_state=hidden)

    head = torch.nn.Linear(4, 9, device="meta")
    model = SimpleNamespace(get_decoder=lambda: decoder, get_output_embeddings=lambda: head)
    block = BranchBlock(2, torch.ones(3, 5, dtype=torch.bool).tril(2))
    ids = torch.zeros(7, dtype=torch.long, device="meta")
    places = torch.zeros(3, dtype=torch.long, device="meta")
    assert read_rows(model, ids, ids, [PackedRow(4, (block,))], places, places).shape == (3,)
    assert seen == [torch.device("meta")]
