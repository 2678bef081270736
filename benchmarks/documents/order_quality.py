"""What the order of documents in a prompt does to answers, on questions whose answers are known.

    python -P benchmarks/documents/order_quality.py --limit 80
    python -P benchmarks/documents/order_quality.py --limit 200 --answers 40 --json FILE
    python -P benchmarks/documents/order_quality.py --faq DIR --sets python perl

The questions and answers are those of Debian's packages python3-doc, perl-doc, debian-faq and
debian-faq-zh-cn. `apt-get install` them; or, without installing them,

    apt-get download python3.11-doc perl-doc debian-faq debian-faq-zh-cn
    for deb in *.deb; do dpkg-deb -x "$deb" DIR; done

(python3.11-doc is what python3-doc depends on in Debian 12) and say `--faq DIR`.

The answers, cut into chunks, are the index; each question's 4 nearest chunks are its documents. The
model is SmolLM2-135M-Instruct, the embedder all-MiniLM-L6-v2, as in `ragserve demo`. Before
anything is measured, a stream of questions whose popularity follows Zipf's law says how often
each chunk is retrieved, and which prompts a cache holds. The policies:

    relevance     the best first
    canonical     the most retrieved first
    cache_aware   after what the cache holds, see `ragserve/prompting/ordering.py`

each also with a line before the question that ranks the documents; and as a control

    best last     relevance backwards, which is no policy of the library's

Two measures:

    log-probability   of the known answer's first tokens after the prompt, a token's mean, in nats:
                      nothing is sampled
    cosine            of the embeddings of a greedy answer and of the known one, for some questions

The same questions are asked under every policy. Differences are from relevance without a line;
their intervals of 95 % come from a paired bootstrap over questions.
"""

from __future__ import annotations

import argparse
import hashlib
import html.parser
import json
import random
import re
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import numpy as np

import ragserve as rs
from ragserve.demo import embedder_model, fingerprint, language_model
from ragserve.engine import cache_directory
from ragserve.prompting import BuiltPrompt, Popularity, SegmentTokens
from ragserve.retrieval import ScoredChunk

TOP_K = 4
CHUNK_TOKENS = 256
GREEDY_TOKENS = 64
WARM_QUESTIONS = 3000
CACHE_TOKENS = 60_000
"""Room of the cache that `cache_aware` looks into: about a fifth of what has been asked for."""
RELEVANCE_LINE = "The documents, the most relevant first: {ranking}."
RESAMPLES = 10_000

Policy = tuple[str, bool]
"""The order, and whether the documents are ranked in a line."""

ORDERS = ("relevance", "canonical", "cache_aware")
CONTROL: Policy = ("best last", False)
POLICIES: tuple[Policy, ...] = (
    *((order, False) for order in ORDERS),
    *((order, True) for order in ORDERS),
    CONTROL,
)
BASE: Policy = ("relevance", False)


# ---- questions and answers


@dataclass(frozen=True, slots=True)
class Entry:
    """A question, and the answer that its authors gave."""

    id: str
    question: str
    answer: str


def python_faq(root: Path) -> Iterator[tuple[str, str]]:
    """reStructuredText: questions are the sections underlined with `-`."""
    underlined = re.compile(r"^(\S.*)\n(=+|-+|\*+)$\n", re.MULTILINE)
    for path in sorted(root.glob("usr/share/doc/python3.*/html/_sources/faq/*.rst.txt")):
        _, *parts = underlined.split(path.read_text(encoding="utf-8"))
        for title, line, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
            if line[0] == "-":
                body = re.sub(r"^\.\. .*$", "", body, flags=re.MULTILINE)
                body = re.sub(r":[\w:+-]+:`~?!?([^`<]*?)(?: *<[^`]*>)?`", r"\1", body)
                body = re.sub(r"`([^`<]*?) *<[^`]*>`_+", r"\1", body)
                yield title.replace("``", "").replace("\\", ""), body.replace("``", "")


def perl_faq(root: Path) -> Iterator[tuple[str, str]]:
    """POD: questions are headings of the second level."""
    for path in sorted(root.glob("usr/share/perl/5.*/pod/perlfaq[1-9].pod")):
        text = path.read_text(encoding="utf-8", errors="replace")
        for part in re.split(r"^=head2 ", text, flags=re.MULTILINE)[1:]:
            title, _, body = re.split(r"^=head1 ", part, flags=re.MULTILINE)[0].partition("\n")
            yield _plain_pod(title), _plain_pod(re.sub(r"^=\w+.*$", "", body, flags=re.MULTILINE))


def _plain_pod(text: str) -> str:
    before = ""
    while text != before:  # codes stand in codes
        before = text
        text = re.sub(r"\bL<(?:([^|<>]*)\|)?([^<>]*)>", lambda m: m[1] or m[2], text)
        text = re.sub(r"\b[BCFISX]<([^<>]*)>", r"\1", text)
        text = re.sub(r"\b[BCFIS]<< (.*?) >>", r"\1", text)
    return text.replace("E<lt>", "<").replace("E<gt>", ">")


def debian_faq(root: Path) -> Iterator[tuple[str, str]]:
    """DocBook's HTML in English: questions are headings with a number and a question mark."""
    yield from _docbook(sorted(root.glob("usr/share/doc/debian/FAQ/*.en.html")))


def debian_faq_chinese(root: Path) -> Iterator[tuple[str, str]]:
    """The same in Chinese."""
    yield from _docbook(sorted(root.glob("usr/share/doc/debian/FAQ/zh-cn/*.zh-cn.html")))


def _docbook(paths: Sequence[Path]) -> Iterator[tuple[str, str]]:
    for path in paths:
        parser = _Sections()
        parser.feed(path.read_text(encoding="utf-8"))
        for title, body in parser.sections:
            question = re.sub(r"^[\d.]+\s+", "", " ".join(title.split()))
            if question.endswith(("?", "？")):
                yield question, body


class _Sections(html.parser.HTMLParser):
    """Titles of the second level and below, each with the text up to the next one."""

    _BREAKS = frozenset({"p", "li", "pre", "dt", "dd", "div"})

    def __init__(self) -> None:
        super().__init__()
        self.sections: list[tuple[str, str]] = []
        self._is_title = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("h2", "h3", "h4"):
            self.sections.append(("", ""))
            self._is_title = True
        elif tag in self._BREAKS:
            self.handle_data("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("h2", "h3", "h4"):
            self._is_title = False

    def handle_data(self, data: str) -> None:
        if self.sections:
            title, body = self.sections[-1]
            self.sections[-1] = (title + data, body) if self._is_title else (title, body + data)


SETS: Mapping[str, Callable[[Path], Iterator[tuple[str, str]]]] = {
    "python": python_faq,
    "perl": perl_faq,
    "debian": debian_faq,
    "debian-zh-cn": debian_faq_chinese,
}


def read_sets(root: Path, names: Sequence[str]) -> dict[str, list[Entry]]:
    """The questions of each set, tidied; ends the program where a package is missing."""
    sets: dict[str, list[Entry]] = {}
    for name in names:
        pairs = {
            re.sub(r"\s+", " ", question).strip(): re.sub(r"\n\s*\n\s*", "\n\n", answer).strip()
            for question, answer in SETS[name](root)
        }
        sets[name] = [
            Entry(f"{name}/{i}", question, answer)
            for i, (question, answer) in enumerate(pairs.items())
            if len(answer) > 80  # "Yes." and "See above." tell nothing
        ]
        if not sets[name]:
            sys.exit(
                f"no questions of set {name!r} under {root}; --help says where they come from, "
                "and --sets leaves one out"
            )
    return sets


# ---- prompts


class WholeSegments:
    """A cache of prompts as a probe sees it: whole segments, those used last, so many tokens."""

    root = b""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._tokens = 0

    def begins(self, parent: bytes, token_ids: Sequence[int], /) -> bool:
        return self._key(parent, token_ids) in self._sizes

    def extend(self, parent: bytes, token_ids: Sequence[int], /) -> tuple[bytes, int]:
        key = self._key(parent, token_ids)
        return key, len(token_ids) if key in self._sizes else 0

    def add(self, built: BuiltPrompt) -> None:
        """A prompt was computed. Its question is not kept."""
        keys, key, start = [], self.root, 0
        for length in built.tokenized.segment_lengths[:-1]:
            key = self._key(key, built.tokenized.token_ids[start : start + length])
            keys.append((key, length))
            start += length
        for key, length in reversed(keys):  # a prompt's end goes before its beginning
            self._tokens += length - self._sizes.pop(key, 0)
            self._sizes[key] = length
        while self._tokens > self._capacity:
            self._tokens -= self._sizes.popitem(last=False)[1]

    @staticmethod
    def _key(parent: bytes, token_ids: Sequence[int]) -> bytes:
        return hashlib.blake2b(
            parent + np.asarray(token_ids, "<u4").tobytes(), digest_size=16
        ).digest()


@dataclass(frozen=True, slots=True)
class Case:
    """A question with its documents, and its prompt under each policy."""

    entry: Entry
    has_answer: bool
    """Whether a chunk of its own answer is among the documents."""
    prompts: dict[Policy, BuiltPrompt]


def make_cases(
    entries: Sequence[Entry],
    asked: Sequence[Entry],
    found: Mapping[str, Sequence[ScoredChunk]],
    tokenizer: SegmentTokens,
    rng: random.Random,
) -> list[Case]:
    """The prompts of `asked`, after a stream of questions out of `entries` has warmed things up."""
    popularity = Popularity()
    cache = WholeSegments(CACHE_TOKENS)
    templates = {
        (order, line): rs.PromptTemplate(
            order=order, relevance_line=RELEVANCE_LINE if line else None
        )
        for order, line in POLICIES
        if order in ORDERS
    }

    def build(entry: Entry, policy: Policy) -> BuiltPrompt:
        documents = list(found[entry.id])
        if policy == CONTROL:  # as if they had been found in that order
            return templates[BASE].build(entry.question, documents[::-1], tokenizer)
        return templates[policy].build(
            entry.question, documents, tokenizer, popularity=popularity, probe=cache
        )

    by_rank = list(entries)
    rng.shuffle(by_rank)
    weights = [1 / rank for rank in range(1, len(by_rank) + 1)]
    for entry in rng.choices(by_rank, weights, k=WARM_QUESTIONS):
        cache.add(build(entry, ("cache_aware", False)))
        popularity.note("", [scored.chunk.id for scored in found[entry.id]])
    return [
        Case(
            entry,
            any(scored.chunk.document_id == entry.id for scored in found[entry.id]),
            {policy: build(entry, policy) for policy in POLICIES},
        )
        for entry in asked
    ]


# ---- measures


async def log_probability(engine: rs.Engine, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Mean log-probability of the answer's tokens after the prompt, in nats."""
    params = rs.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    completion = await engine.generate([*prompt, *answer], params)
    logprobs = (completion.prompt_logprobs or ())[len(prompt) :]
    return float(np.mean([logprob.logprob for logprob in logprobs if logprob is not None]))


async def for_each_prompt(case: Case, measure: Callable[[BuiltPrompt], Any]) -> dict[Policy, Any]:
    """`measure` under each policy; policies that come to the same prompt share its result."""
    results: dict[str, Any] = {}

    async def run(built: BuiltPrompt) -> None:
        results[built.text] = await measure(built)

    async with anyio.create_task_group() as tasks:
        for built in {built.text: built for built in case.prompts.values()}.values():
            tasks.start_soon(run, built)
    return {policy: results[built.text] for policy, built in case.prompts.items()}


def interval(values: Sequence[float], rng: np.random.Generator) -> tuple[float, float]:
    """The 95 % interval of the mean, from resampling the questions."""
    array = np.asarray(values)
    draws = rng.integers(0, len(array), (RESAMPLES, len(array)))
    low, high = np.percentile(array[draws].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def summary(
    cases: Sequence[Case], results: Sequence[Mapping[Policy, float]]
) -> list[dict[str, Any]]:
    """For each policy the mean, and how it differs from `BASE`."""
    rng = np.random.default_rng(0)
    rows = []
    for policy in cases[0].prompts:
        values = [result[policy] for result in results]
        differences = [result[policy] - result[BASE] for result in results]
        low, high = interval(differences, rng)
        moved = [
            case.prompts[policy].used != case.prompts[BASE].used
            for case, _ in zip(cases, results, strict=False)
        ]
        rows.append(
            {
                "order": policy[0],
                "line": policy[1],
                "questions": len(values),
                "mean": float(np.mean(values)),
                "difference": float(np.mean(differences)),
                "low": low,
                "high": high,
                "other_order": float(np.mean(moved)),
            }
        )
    return rows


def table(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as Markdown."""
    lines = [
        f"| {title}, {rows[0]['questions']} questions | mean | difference | 95 % interval | "
        "other order than by relevance |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        name = row["order"] + (" + line" if row["line"] else "")
        is_base = (row["order"], row["line"]) == BASE
        lines.append(
            f"| {name} | {row['mean']:.4f} | "
            + (
                "| |"
                if is_base
                else f"{row['difference']:+.4f} | {row['low']:+.4f} to {row['high']:+.4f} |"
            )
            + f" {100 * row['other_order']:.0f} % |"
        )
    return "\n".join(lines)


# ---- all of it


async def open_index(
    entries: Sequence[Entry],
    embedder: rs.SentenceTransformerEmbedder,
    engine: rs.Engine,
    say: Callable[[str], None],
) -> rs.FaissIndex:
    """The answers' chunks; kept in the user's cache folder, for embedding them takes a while."""
    splitter = rs.TokenSplitter(engine.tokenizer, CHUNK_TOKENS)
    documents = [rs.Document(entry.id, entry.answer) for entry in entries]
    key = fingerprint(documents, embedder.model_name, language_model().name, repr(splitter))
    path = cache_directory() / "indexes" / f"order-quality-{key}"
    if path.exists():
        return await rs.FaissIndex.open(path, embedder=embedder)
    index = rs.FaissIndex(embedder, splitter=splitter)

    def progress(done: int, total: int) -> None:
        say(f"{done} of {total} chunks embedded")

    await index.add(documents, progress=progress)
    path.parent.mkdir(parents=True, exist_ok=True)
    await index.save(path)
    return index


async def run(args: argparse.Namespace) -> None:
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:6.1f} s] {text}", file=sys.stderr, flush=True)

    sets = read_sets(args.faq, args.sets)
    entries = [entry for of_set in sets.values() for entry in of_set]
    say(", ".join(f"{name}: {len(of_set)} questions" for name, of_set in sets.items()))
    rng = random.Random(args.seed)
    # As many of each set as its size; spread evenly, so that the first ones are a fair choice too.
    spread = [
        ((i + rng.random()) / len(of_set), entry)
        for of_set in sets.values()
        for i, entry in enumerate(rng.sample(of_set, len(of_set)))
    ]
    asked = [entry for _, entry in sorted(spread, key=lambda pair: pair[0])][: args.limit]

    async with (
        rs.SentenceTransformerEmbedder(embedder_model()) as embedder,
        rs.Engine.open(language_model(), max_model_len=8192, dtype=args.dtype) as engine,
    ):
        index = await open_index(entries, embedder, engine, say)
        say(f"{len(index)} chunks indexed")
        vectors = await embedder.embed([entry.question for entry in entries], kind="query")
        found = {
            entry.id: await index.retrieve(vector, top_k=TOP_K)
            for entry, vector in zip(entries, vectors, strict=True)
        }
        tokenizer = SegmentTokens(engine.tokenizer)
        say("questions embedded")
        cases = await anyio.to_thread.run_sync(make_cases, entries, asked, found, tokenizer, rng)
        recall = np.mean([case.has_answer for case in cases])
        say(f"prompts made; the answer is among the documents of {100 * recall:.0f} %")

        logprobs: list[dict[Policy, float]] = []
        for case in cases:
            answer = engine.tokenizer.encode(case.entry.answer, add_special_tokens=False)
            answer = answer[: args.answer_tokens]

            async def measure(built: BuiltPrompt, answer: list[int] = answer) -> float:
                return await log_probability(engine, built.tokenized.token_ids, answer)

            logprobs.append(await for_each_prompt(case, measure))
            if len(logprobs) % 10 == 0:
                say(f"log-probabilities of {len(logprobs)} of {len(cases)} questions")
            if time.monotonic() - started > args.seconds:
                say(f"--seconds are over after {len(logprobs)} questions")
                break

        greedy = rs.SamplingParams(temperature=0.0, max_tokens=GREEDY_TOKENS)
        cosines: list[dict[Policy, float]] = []
        for case in cases[: min(args.answers, len(logprobs))]:

            async def generate(built: BuiltPrompt) -> str:
                return (await engine.generate(built.tokenized, greedy)).text

            texts = await for_each_prompt(case, generate)
            reference, *answers = await embedder.embed([case.entry.answer, *texts.values()])
            cosines.append(
                {
                    policy: float(answer @ reference)
                    for policy, answer in zip(texts, answers, strict=True)
                }
            )
            if len(cosines) % 10 == 0:
                say(f"greedy answers to {len(cosines)} questions")
        if args.answers:
            say("greedy answers embedded")

    report: dict[str, Any] = {
        "model": engine.model_name,
        "dtype": args.dtype,
        "questions": {name: len(of_set) for name, of_set in sets.items()},
        "top_k": TOP_K,
        "chunk_tokens": CHUNK_TOKENS,
        "answer_tokens": args.answer_tokens,
        "relevance_line": RELEVANCE_LINE,
        "measured": len(logprobs),
        "answer_retrieved": float(np.mean([case.has_answer for case in cases[: len(logprobs)]])),
        "seconds": time.monotonic() - started,
        "log_probability": {},
        "cosine": {},
    }
    measured = list(zip(cases, logprobs, strict=False))
    groups = {
        "all": measured,
        "answer among the documents": [pair for pair in measured if pair[0].has_answer],
        **{
            name: [pair for pair in measured if pair[0].entry.id.startswith(f"{name}/")]
            for name in sets
        },
    }
    for group, pairs in groups.items():
        if pairs:
            rows = summary([case for case, _ in pairs], [result for _, result in pairs])
            report["log_probability"][group] = rows
            print(table(f"log-probability a token ({group})", rows), end="\n\n")
    if cosines:
        report["cosine"]["all"] = rows = summary(cases, cosines)
        print(table("cosine to the known answer", rows), end="\n\n")
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--faq",
        type=Path,
        default=Path("/"),
        metavar="DIR",
        help="where dpkg-deb -x has laid the packages' files; default: where apt-get does",
    )
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--limit", type=int, metavar="N", help="most questions that are asked")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="ask no more questions after so long"
    )
    parser.add_argument(
        "--answers",
        type=int,
        default=20,
        metavar="N",
        help="questions that are answered, for the cosine",
    )
    parser.add_argument(
        "--answer-tokens",
        type=int,
        default=64,
        metavar="N",
        help="tokens of the known answer that are judged",
    )
    parser.add_argument("--dtype", default="bfloat16", help="of the model; float32 is slower")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to it")
    anyio.run(run, parser.parse_args())


if __name__ == "__main__":
    main()
