"""Writes docs/coming-from/names/: every name that the documents of the older systems have.

The pages in docs/coming-from/ answer each of them; tests/docs/test_coming_from.py compares the two.

    python tools/seed_names.py DOCUMENTS NOTES...

DOCUMENTS is a folder with the systems' own documents as text, NOTES are Markdown files about their semantics.
A document belongs to the system whose mark it has; of the notes, what stands below a system's title.

What is a name:

- in a document, an API heading (`name¶`, `name(arguments)¶`) and the arguments of signatures; the head of an
  item or a row of parameters; in source code, public classes and functions and the parameters that they
  document, constants, and what is imported, called of a hook, or asked of the model and the configuration;
- in notes, a text in backquotes, and the first column of a table of hooks, events or commands, both with
  their arguments; options (`-o`, `--name`);
- in the prose of both, a word that only code is written like: `inner_underscore`, `CamelCase`.

What is none: what begins with an underscore, or is one letter; what stands behind another library's prefix
(`tf.`, `logging.`); Python's own words and exceptions; what EXCLUDED lists, the one part that was made by
hand, with its reasons.
"""

from __future__ import annotations

import argparse
import builtins
import keyword
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NAMES = Path(__file__).parent.parent / "docs" / "coming-from" / "names"


@dataclass(frozen=True)
class Seed:
    """An older system.

    Attributes:
        page: the name of its page.
        mark: what only its document has; the document begins there.
        titles: words of the headings and items that are about it in notes.
        apart: words of headings below those that another page answers.
        until: where its document ends; "": at the end of the text.
    """

    page: str
    mark: str
    titles: tuple[str, ...]
    apart: str = "(nothing)"
    until: str = ""


SEEDS = (
    Seed("tfsnippet", "tfsnippet.TrainLoop(", ("TFSnippet", "TrainLoop:")),
    Seed("emloop", "Source code for emloop", ("emloop",)),
    Seed("model-garden", "base_trainer.Trainer(", ("Orbit",)),
    Seed("tf-supervisor", "supervisor\nbasic use process", ("Supervisor",), apart="Experiment"),
    Seed(
        "tf-experiment",
        "Experiment\nhttps://",
        ("Experiment and Estimator",),
        until="supervisor\nbasic use process",
    ),
    Seed("tfutils", "tfutils.base¶", ("tfutils",)),
)

EXCLUDED = {
    "other products": "AdamW DeepSpeech TensorBoard TensorFlow",
    "headings and words of the text": "common constructor Constructor initialization method Methods "
    "Parameters Recovery Args Returns",
    "words that have grown together, or with a typo": "andapply_gradients exp_ids ExportStrategys "
    "oftrain_params start_delay train_parms",
    "in examples, a user's own": "input_x input_y step_loss test_x test_y train_data train_flow train_op",
    "everstep's, in the notes": "local_init_fn ready",
    "values, formulas and files": "acc accuracy auc ckpt f1 info json KEY NaN sqrt tar train_loss warn yaml",
    "places of arguments whose name is not given": "args ctx ex fn kw kwargs kwds msg self values",
    "inner variables that the notes quote": "best_ckpt_logs max_trials merged num_replicas",
}

WORD = r"[A-Za-z]\w*"
CALL = re.compile(rf"(?<!\w)({WORD})\(((?:[^()]|\([^()]*\))*)\)")
LIKE_CODE = re.compile(
    r"(?<![\w.@/])(?:[a-z][a-z0-9]*(?:_[a-z0-9]+)+(?![a-z0-9_])"
    r"|[A-Z]+(?:_[A-Z0-9]+)+(?!\w)|[A-Z]+[a-z]+(?:[A-Z]+[a-z]*)+(?!\w))"
)
OPTION = re.compile(r"(?<![\w-])--?[a-z][\w-]*")
FOREIGN = re.compile(r"\b(?:tf|logging|typing|collections|_sre|re|np|os|sys)\.[\w.]+")
NO_NAMES = {*dir(builtins), *keyword.kwlist, *typing.__all__, *" ".join(EXCLUDED.values()).split()}


def arguments(given: str) -> Iterator[str]:
    """The names of the arguments of a signature or a call."""
    bare = re.sub(r"\[[^\[\]]*\]|<[^<>]*>|\{[^{}]*\}|'[^']*'", "", given)
    for part in re.split(r"[,|]", bare):
        if found := re.match(rf"[\s\[\\]*\*{{0,2}}({WORD})\s*(?:[=:\]].*)?$", part, re.DOTALL):
            yield found[1]


def of_call(text: str) -> Iterator[str]:
    """The names of `name`, `a.b.name`, `name/unit`, `name=`, `name(arguments)`."""
    if found := re.fullmatch(rf"\.?(?:{WORD}\.)*({WORD}(?:/{WORD})?)=?", text):
        yield found[1]
    for name, given in CALL.findall(text):
        yield name
        yield from arguments(given)


def of_document(text: str) -> Iterator[str]:
    """Names in a text that was made from the pages of an API."""
    yield from re.findall(rf"^({WORD})(?:\([^)]*\))?¶", text, re.MULTILINE)
    yield from re.findall(rf"^(?:[a-z]\w*\.)*({WORD})\(", text, re.MULTILINE)
    for _, given in re.findall(r"^([\w.]+)\(((?:[^()]|\([^()]*\))*)\)", text, re.MULTILINE):
        yield from arguments(given)
    yield from re.findall(rf"^(?:- )?({WORD}):?$", text, re.MULTILINE)
    yield from LIKE_CODE.findall(text)


def of_source(text: str) -> Iterator[str]:
    """Names in source code whose lines were lost: what is public and what it documents."""
    yield from re.findall(rf"\bclass ({WORD})", text)
    yield from re.findall(r"\b([A-Z]+(?:_[A-Z]+)+) = \[", text)
    yield from re.findall(rf"\b(?:hook|main_loop|_model)\.({WORD})", text)
    for imported in re.findall(r"^from \.[\w.]* import (.*)$", text, re.MULTILINE):
        yield from re.findall(WORD, imported)
    for name, body in re.findall(r"\bdef (\w+)\((.*?)(?=\bdef |\Z)", text, re.DOTALL):
        if name == "__init__" or not name.startswith("_"):
            yield name
            yield from re.findall(r":param (\w+):", body)


def of_notes(text: str) -> Iterator[str]:
    """Names in Markdown."""
    header = before = ""
    for line in text.splitlines():
        if line.startswith("|---"):
            header = before
        elif line.startswith("|"):
            yield from of_first_column(header, re.split(r"(?<!\\)\|", line)[1].strip())
        for span in re.findall(r"`([^`]+)`", line):
            yield from (name for one in spelled_out(span.replace("\\|", "|")) for name in of_call(one))
            yield from LIKE_CODE.findall(span)
            yield from OPTION.findall(span)
        yield from LIKE_CODE.findall(re.sub(r"`[^`]*`", " ", line))
        before = line


def spelled_out(span: str) -> list[str]:
    """`stop_if_{higher,lower}_hook(...)` as the two that it stands for."""
    if found := re.fullmatch(r"(\w+)\{(\w+(?:,\w+)+)\}(.*)", span):
        return [f"{found[1]}{each}{found[3]}" for each in found[2].split(",")]
    return [span]


def of_first_column(header: str, cell: str) -> Iterator[str]:
    """Names in the first cell of a row, by its table's header."""
    if header.startswith("| Command "):
        yield cell.split()[0]
        yield from OPTION.findall(cell)
    elif re.match(r"\| (?:Hook|Event) ", header):
        for part in re.split(r"(?:, |/| / )(?![^(]*\))", cell):
            yield from of_call(part.strip().replace("\\|", "|"))


def notes_about(seed: Seed, notes: str) -> Iterator[str]:
    """The sections and list items that are about a system."""
    above = ""
    for part in re.split(r"^(?=#+ )", notes, flags=re.MULTILINE):
        heading = part.partition("\n")[0]
        if heading.startswith("## "):
            above = heading
        is_about = any(title in above + heading for title in seed.titles)
        if is_about and (heading == above or seed.apart not in heading):
            yield part
        else:
            for line in part.splitlines():
                if any(re.match(rf"- [\w /]*{title}[\w /]*:? ", line) for title in seed.titles):
                    yield line


def names(seed: Seed, documents: list[str], notes: list[str]) -> list[str]:
    """All names of a system, sorted."""
    found: set[str] = set()
    (document,) = (text[text.index(seed.mark) :] for text in documents if seed.mark in text)
    read = of_source if "Source code" in seed.mark else of_document
    if seed.until:
        document = document[: document.index(seed.until)]
    found.update(read(FOREIGN.sub("", document)))
    for text in notes:
        for part in notes_about(seed, text):
            found.update(of_notes(FOREIGN.sub("", part)))
    return sorted(
        (name for name in found if is_name(name) and not is_torn(name, found)),
        key=lambda name: (name.lower(), name),
    )


def is_name(name: str) -> bool:
    return len(name) > 1 and not name.startswith("_") and name not in NO_NAMES


def is_torn(name: str, others: set[str]) -> bool:
    """Whether a class's name has grown together with the next word (`TrainLoopcan`), or is a plural."""
    return any(other[1:] != other[1:].lower() and re.fullmatch(f"{other}[a-z]+", name) for other in others)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("documents", type=Path)
    parser.add_argument("notes", type=Path, nargs="*")
    given = parser.parse_args()
    documents = [path.read_text() for path in sorted(given.documents.glob("*.txt"))]
    notes = [path.read_text() for path in given.notes]
    for seed in SEEDS:
        (NAMES / f"{seed.page}.txt").write_text(
            "".join(f"{name}\n" for name in names(seed, documents, notes))
        )


if __name__ == "__main__":
    main()
