"""Train the tiny base model of the closed web: `trace-pl make-base`.

One seeded command makes tokenizer, transcripts and a Qwen3 of about one million parameters.
Three quarters of the transcripts walk webs whose names and links are drawn anew, so they can only
be predicted by copying from the page; the rest teach the real web.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from statistics import fmean

import lightning
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import Qwen3ForCausalLM

from trace_pl.commands.make_base.architecture import build_model
from trace_pl.commands.make_base.encoded_transcripts import Encoder, WeightedTokens, similar_lengths
from trace_pl.commands.make_base.recipe import BaseRecipe
from trace_pl.commands.make_base.tokenizer import END, START, TAGS, train_tokenizer
from trace_pl.commands.make_base.transcripts import Demonstrator, Noise, Transcript
from trace_pl.files import folder_beside
from trace_pl.models.names import BUILT_IN_BASE
from trace_pl.tasks.closed_web.task import web_browser
from trace_pl.tasks.closed_web.world import KINDS, ClosedWeb


def make_transcripts(recipe: BaseRecipe) -> list[Transcript]:
    """Walk the real web's ``base`` chains and any chain of the fresh webs."""
    rng = random.Random(f"transcripts-{recipe.seed}")
    webs = [ClosedWeb(), *(ClosedWeb(seed=1_000 + i) for i in range(recipe.num_webs))]
    guides = [Demonstrator(web, web_browser(web)) for web in webs]
    hops = range(1, len(KINDS))
    splits = [("base",)] + [("base", "train", "validation", "test")] * recipe.num_webs
    chains = [
        {h: [c for split in names for c in web.chains(h, split)] for h in hops}
        for web, names in zip(webs, splits, strict=True)
    ]
    noise = Noise(recipe.right_relation, recipe.right_result, recipe.give_up)
    steady = Noise(right_result=recipe.right_result)
    transcripts = []
    for _ in tqdm(range(recipe.num_transcripts), desc="transcripts", disable=None):
        which = rng.randrange(1, len(webs)) if rng.random() < recipe.permuted_share else 0
        chain = rng.choice(chains[which][rng.choice(hops)])
        if rng.random() < recipe.probed_share:
            transcripts.append(guides[which].probed_transcript(chain, steady, rng))
        else:
            transcripts.append(guides[which].transcript(chain, noise, rng))
    return transcripts


def markup_free_pieces(transcripts: Sequence[Transcript]) -> Iterator[str]:
    """Yield the texts between markup tokens, which is what the tokenizer's merges may span."""
    markup = re.compile("|".join(map(re.escape, (*TAGS, START, END))))
    for transcript in transcripts:
        tools = "tools: search(query) open(id) find(pattern)"
        dialogue = [f"system\n{tools}", "user\n", transcript.question, "assistant\n", "\n"]
        texts = [*dialogue, *(text for turn in transcript.turns for text in turn)]
        yield from (piece for text in texts for piece in markup.split(text) if piece)


def weighted_loss(model: Qwen3ForCausalLM, batch: Sequence[WeightedTokens]) -> Tensor:
    """Return the weighted mean next-token loss of a right-padded batch."""
    ids_BT = pad_sequence([row.ids_T for row in batch], batch_first=True)
    weights_BT = pad_sequence([row.weights_T for row in batch], batch_first=True)[:, 1:]
    hidden_BTD = model.model(ids_BT, use_cache=False).last_hidden_state[:, :-1]
    used = weights_BT > 0
    logits = model.lm_head(hidden_BTD[used])
    losses = F.cross_entropy(logits, ids_BT[:, 1:][used], reduction="none")
    return (losses * weights_BT[used]).sum() / weights_BT.sum()


def train(
    model: Qwen3ForCausalLM, batches: Sequence[list[WeightedTokens]], recipe: BaseRecipe
) -> list[float]:
    """Train one pass over the batches and return the loss of each."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        # Constant until the last third, then down to a fiftieth.
        lambda s: min(1.0, (s + 1) / recipe.warmup_steps, 3.0 * (1.0 - s / len(batches)) + 0.02),
    )
    losses: list[float] = []
    with tqdm(batches, desc="base model", mininterval=1.0) as bar:
        for batch in bar:
            loss = weighted_loss(model, batch)
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            bar.set_postfix(loss=f"{fmean(losses[-50:]):.3f}", refresh=False)
    return losses


def make_base(recipe: BaseRecipe, output: Path) -> None:
    """Make tokenizer, transcripts and model, and put them into ``output`` in one rename."""
    lightning.seed_everything(recipe.seed, verbose=False)
    torch.set_num_threads(recipe.num_threads)
    transcripts = make_transcripts(recipe)
    tokenizer = train_tokenizer(markup_free_pieces(transcripts[:4_000]), recipe.vocab_size)
    encoder = Encoder(tokenizer, recipe.read_weight, recipe.probed_weight)
    model = build_model(tokenizer, recipe.vocab_size)
    rows = [encoder.transcript(transcript) for transcript in transcripts]
    rng = random.Random(recipe.seed)
    losses = train(model, similar_lengths(rows, recipe.batch_size, rng), recipe)
    with folder_beside(output, replaces=True) as draft:
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        (draft / "README.md").write_text(model_card(recipe, model, losses), encoding="utf-8")


def model_card(recipe: BaseRecipe, model: Qwen3ForCausalLM, losses: Sequence[float]) -> str:
    """Return the card that is shipped beside the weights."""
    return f"""---
license: apache-2.0
library_name: transformers
---
# {BUILT_IN_BASE}

A Qwen3 of {model.num_parameters():,} parameters with its own tokenizer and chat template, made by

    trace-pl make-base

from nothing but the built-in closed web (`trace_pl/tasks/closed_web`): {recipe.num_transcripts:,}
tool-use transcripts with wrong relations, wrong results and early ends on purpose.
{recipe.permuted_share:.0%} walk webs of fresh names, so that it learns to copy from a page;
{recipe.probed_share:.0%} are cut short and end with the gold answer in the prober's own words, so
that it knows early what can be known of an answer; runs that start from it are no test of learning
without supervision. Two of its heads start out as an induction circuit, which would take
longer to form than all this training (`architecture.py`). It has seen no chain of the train,
validation or test questions. It is the starting point and the frozen reference of the quickstart,
and good for nothing else.

Mean weighted loss of the last 50 of {len(losses)} steps: {fmean(losses[-50:]):.3f}.
Versions: torch {torch.__version__}, transformers {version("transformers")}.

Recipe:

```json
{json.dumps(asdict(recipe), indent=2)}
```
"""
