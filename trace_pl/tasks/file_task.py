"""The task in files of your own: questions over a corpus that is searched."""

from __future__ import annotations

from collections.abc import Callable

from trace_pl.errors import ConfigError, DataError
from trace_pl.tasks.protocol import Split, Task
from trace_pl.tasks.questions import load_questions
from trace_pl.tools.browser import Browser
from trace_pl.tools.corpus import Corpus
from trace_pl.tools.index import SearchIndex
from trace_pl.tools.protocol import Toolbox
from trace_pl.tools.stored_index import StoredBm25Index
from trace_pl.types import Question


class FileTask(Task):
    """Questions in JSONL files, by default over a corpus in a JSONL file, searched with a browser.

    Args:
        train: Questions, one a line: ``id``, ``question``, ``answer``, ``answer_aliases``.
        validation: Held-out questions.
        test: Questions for ``trace-pl test``; None means those of ``validation``.
        corpus: One document a line: ``id``, ``title``, ``text``. None where `data.tools` gives
            other tools than a search of documents.
        index: Given the corpus, finds documents in it.
        browser: Given corpus and index, makes the tools.
    """

    def __init__(
        self,
        train: str,
        validation: str,
        test: str | None = None,
        corpus: str | None = None,
        index: Callable[[Corpus], SearchIndex] = StoredBm25Index,
        browser: Callable[[Corpus, SearchIndex], Browser] = Browser,
    ) -> None:
        """Store paths; files are read when they are needed."""
        self.corpus = corpus
        self.make_index = index
        self.make_browser = browser
        self.files: dict[Split, str] = {
            "train": train,
            "validation": validation,
            "test": test or validation,
        }

    def questions(self, split: Split) -> list[Question]:
        """Return the questions of a split.

        Raises:
            DataError: if the file breaks its format, or shares ids with the training questions.
        """
        questions = load_questions(self.files[split])
        if split == "train" and self.files["test"] != self.files["validation"]:
            load_questions(self.files["test"])  # or its faults would be told when training is over
        if split != "train":
            shared = {q.id for q in questions} & {q.id for q in load_questions(self.files["train"])}
            if shared:
                raise DataError(
                    f"Expected {split} questions apart from the training ones, got shared ids "
                    f"{sorted(shared)[:3]}. Remove them from '{self.files[split]}'."
                )
        return questions

    def toolbox(self) -> Toolbox:
        """Return a browser over the corpus.

        Raises:
            ConfigError: if there is no corpus.
        """
        if self.corpus is None:
            raise ConfigError(
                "Expected data.task.init_args.corpus, or other tools as data.tools, got neither."
            )
        corpus = Corpus.from_jsonl(self.corpus)
        return self.make_browser(corpus, self.make_index(corpus))
