"""The verdict: what the figures of one trace mean, in a few sentences, and only what they bear out."""

from collections.abc import Iterator

import attrs

from ._bench_table import size_text
from ._lab_findings import PLAN, Facts, Findings, Found
from ._simulate import POOL

# XLA's allocator is called good enough up to this multiple of the peak; it is also the device of the long run.
LITTLE = 1.05
# What differs by less is called as much.
SAME = 1.02
# A share of the peak that is worth a sentence.
MUCH = 0.05
# The least region that XLA's allocator takes is twice as large.
TINY = 2**20
# Where even the best allocator needs more than this, the program is at fault.
HOPELESS = 1.5

TITLES = {
    "bfc": "XLA's allocator",
    "bfc_growing": "XLA's allocator, growing",
    "pytorch": "PyTorch's allocator",
    "cupy": "CuPy's allocator",
    "rmm": "RMM's allocator",
    "best_fit": "best fit",
    "first_fit": "first fit",
    POOL: "the pool",
    PLAN: "the planned pool",
}

SHORT = {name: title.removesuffix("'s allocator").removeprefix("the ") for name, title in TITLES.items()} | {
    "bfc": "XLA (bfc)",
    "bfc_growing": "XLA, growing",
}


@attrs.frozen
class Answer:
    """One question and what there is to say to it.

    Attributes:
        question: As a reader would ask it.
        sentences: The answer.
    """

    question: str
    sentences: tuple[str, ...]


@attrs.frozen
class Verdict:
    """What the figures mean.

    Attributes:
        headline: The verdict in one or two sentences.
        helps: Whether a pool would save memory; None where the figures do not say.
        answers: The questions that a newcomer has.
    """

    headline: str
    helps: bool | None
    answers: tuple[Answer, ...]

    def __str__(self) -> str:
        paragraphs = [self.headline, *(f"{a.question} {' '.join(a.sentences)}" for a in self.answers)]
        return "\n\n".join(paragraphs)


def verdict(findings: Findings) -> Verdict:
    """Returns what the figures mean.

    Args:
        findings: What was found; parts may be missing, and nothing is then said about them.
    """
    headline, helps = _headline(findings)
    answers = [
        Answer("How much is lost, and to what?", tuple(_losses(findings))),
        Answer("How small a device would do?", tuple(_least(findings))),
        Answer("What breaks first?", tuple(_breaks(findings))),
        Answer("What would change it?", tuple(_remedies(findings))),
    ]
    return Verdict(headline, helps, tuple(a for a in answers if a.sentences))


def _headline(findings: Findings) -> tuple[str, bool | None]:
    facts = findings.facts
    needs = {name: need for name in findings.by_allocator if (need := findings.need(name)) is not None}
    if not needs:
        return "Nothing was run to the end, so there is no verdict.", None
    best = min(needs, key=lambda name: needs[name])
    pools = {name: need for name, need in needs.items() if name in (POOL, PLAN)}
    bfc = needs.get("bfc")
    if facts.peak_bytes < TINY:
        return f"At most {size_text(facts.peak_bytes)} are alive: with so little, no allocator matters.", False
    if bfc is None or not pools:
        return f"Of those tried, {TITLES[best]} needs least: {_of_peak(needs[best], facts)}.", None
    name = min(pools, key=lambda n: pools[n])
    pool, found = pools[name], findings.by_allocator["bfc"]
    failed = found.long.failed if found.long is not None else 0
    if bfc <= LITTLE and not failed:
        enough = f"XLA's allocator serves this as it is, in {_of_peak(bfc, facts)}"
        return f"You do not need a pool to save memory. {enough}; {_more(pool, bfc, TITLES[name], facts)}.", False
    fault = f"XLA's allocator needs {_of_peak(bfc, facts)}"
    if pool * SAME <= bfc:
        what = "known before the first step" if name == PLAN else "at the price of conversions"
        saved = f"{size_text((bfc - pool) * facts.peak_bytes)} less"
        return f"A pool would help: {fault}, {TITLES[name]} {saved}, {_of_peak(pool, facts)}, {what}.", True
    if min(bfc, pool, needs.get("best_fit", pool)) > HOPELESS:
        cause = "It is the program that breaks its memory up, by what it keeps alive between what it frees."
        return f"A pool does not cure this: {fault}, {TITLES[name]} {_of_peak(pool, facts)}. {cause}", False
    if pool <= bfc * SAME:
        gain = "reserved before the first step, so that it cannot fail later" if name == PLAN else "as a hard budget"
        return f"A pool would save no memory, but certainty: it needs {_of_peak(pool, facts)}, {gain}; {fault}.", None
    more = f"{fault}, and {TITLES[name]} still more, {_of_peak(pool, facts)}"
    count, plan = min(
        findings.plan_bytes.items(), key=lambda item: item[1], default=(0, round(pool * facts.peak_bytes))
    )
    if plan / facts.peak_bytes <= bfc * SAME:
        return (
            f"With {facts.classes} size classes a pool would not help: {more}. With up to {count} a plan takes "
            f"{_times(plan / facts.peak_bytes)} (`--max-classes {count}`)."
        ), None
    return f"A pool would not help: {more}.", False


def _losses(findings: Findings) -> Iterator[str]:
    peak = findings.facts.peak_bytes
    yield f"At its peak the program has {size_text(peak)} alive; that is 1.00 in what follows."
    for name in ("bfc", POOL, PLAN):
        waste = findings.by_allocator.get(name, Found()).waste
        if waste is None:
            continue
        pooled = name in (POOL, PLAN)
        parts = (
            (waste.rounding_bytes, "padding to its classes" if pooled else "rounding and chunks given whole"),
            (waste.unused_bytes, "slots that lie idle" if pooled else "holes that are too short"),
            (waste.hole_bytes, "the alignment of its slots"),
        )
        told = [f"{_percent(part / peak)} to {what}" for part, what in parts if part / peak >= 0.005]
        lost = _list(told) if told else "nothing to speak of"
        yield f"With unlimited memory {TITLES[name]} takes {_times(waste.total_bytes / peak)}: it loses {lost}."
    pool, plan = (findings.by_allocator.get(name, Found()).waste for name in (POOL, PLAN))
    if pool is not None and findings.facts.families:
        yield "The pool's size classes are those that were recorded; the plan chooses its own."
    if pool is not None and plan is not None and pool.total_bytes > SAME * plan.total_bytes:
        yield (
            "The pool without a plan takes more than the planned one since it makes a slot whenever none of its class "
            "is free, where a plan has weighed classes and slots against each other beforehand."
        )


def _least(findings: Findings) -> Iterator[str]:
    facts = findings.facts
    known = {n: f for n, f in findings.by_allocator.items() if f.least is not None and f.least.bytes is not None}
    if not known:
        return
    order = sorted(known, key=lambda n: findings.need(n) or 0)
    told = ", ".join(f"{TITLES[n]} with {_times(findings.need(n) or 0)}" for n in order)
    yield f"The whole trace is served, from the least device up, by {told}."
    steps = [f.least.resolution_bytes / facts.peak_bytes for f in known.values() if f.least is not None]
    if max(steps) > 0:
        yield (
            f"Sizes were tried in steps, the last ones of at most {max(steps):.1%} of the peak; so much less might do."
        )
    for name, found in known.items():
        if found.least is not None and found.least.islands:
            islands = ", ".join(_times(size / facts.peak_bytes) for size in found.least.islands[:3])
            yield (
                f"{_capital(TITLES[name])} happens to survive with {islands} as well, and fails in between: luck, "
                "which another order of the same requests would not have."
            )
    if PLAN in known:
        yield (
            "The plan is fitted to this very trace. Another run may ask for more, which the pool then converts or "
            "spills; `Plan.misfits` tells what."
        )
    lost = [TITLES[n] for n, f in findings.by_allocator.items() if f.least is not None and f.least.bytes is None]
    if lost:
        yield f"No size that was tried is enough for {', '.join(lost)}."


def _breaks(findings: Findings) -> Iterator[str]:
    runs = {name: found.long for name, found in findings.by_allocator.items() if found.long is not None}
    if not runs:
        return
    some = next(iter(runs.values()))
    fine = [TITLES[n] for n, run in runs.items() if not run.failed and not run.needs_bytes]
    where = f"In a device of {size_text(some.limit_bytes)}, {LITTLE:.0%} of the peak, and {some.passes} times over"
    if fine:
        yield f"{where}, {_list(fine)} {'serves' if len(fine) == 1 else 'serve'} every request."
    failing = sorted((n for n, run in runs.items() if run.first), key=lambda n: runs[n].first.event)  # pyright: ignore[reportOptionalMemberAccess]
    if not fine:
        yield f"{where}, none serves every request."
    for number, name in enumerate(failing):
        run = runs[name]
        assert run.first is not None
        if number and name not in ("bfc", POOL):  # The rest is in the table.
            continue
        first = run.first
        at = "The first to fail is" if not number else "Then"
        left = size_text(first.free_bytes)
        if first.free_bytes < first.size:
            why = f"with {left} left: it is full"
        elif name == POOL:
            why = f"with {left} free or idle, of which it could make no one piece"
        elif first.largest_free_bytes < first.size:
            why = f"with {left} free, in pieces of at most {size_text(first.largest_free_bytes)}"
        else:
            why = f"with {left} free, but in no block that it gives for such a size"
        yield (
            f"{at} {TITLES[name]}, at event {first.event:,}: {size_text(first.size)} are asked for {why}; "
            f"{run.failed:,} of {run.requests:,} requests fail in all, and a program would have ended at the first."
        )
    for name, run in runs.items():
        if run.needs_bytes:
            yield (
                f"{_capital(TITLES[name])} cannot begin there, since it takes {size_text(run.needs_bytes)}; given so "
                "much, it serves the trace as often as it comes, and makes nothing any more."
            )


def _remedies(findings: Findings) -> Iterator[str]:
    facts, found = findings.facts, findings.by_allocator
    peak = facts.peak_bytes
    yield from _holes(found.get("bfc", Found()), facts)
    if findings.plan_bytes:
        yield from _classes(findings)
    pool = found.get(POOL, Found())
    if pool.waste is not None and pool.waste.unused_bytes > MUCH * peak:
        yield (
            "Slots that lie idle while others are short (stranding) cost the pool "
            f"{_percent(pool.waste.unused_bytes / peak)}: the classes are busy at different times."
        )
        if pool.long is not None and pool.long.conversions:
            creations, conversions = (f"{n:.0f}" if n >= 10 else f"{n:.1f}" for n in pool.long.per_thousand)
            outcome = "and still fails" if pool.long.failed else "and serves everything"
            yield (
                f"On a device of {LITTLE:.0%} of the peak it converts them, {conversions} times in 1,000 requests with "
                f"{creations} new buffers, {outcome}; where phases alternate slowly, `pool.trim` between them gives "
                "the memory back instead."
            )
    if facts.distinct_sizes > max(facts.classes, 1):
        yield (
            f"Where these sizes are shapes of a jitted function's arguments, a pool pays in another way: "
            f"{facts.distinct_sizes:,} sizes are as many compilations, and the size classes of a pool are "
            f"{facts.classes}. If they do not reach such a function, that is no reason either."
        )
    else:
        sizes = "is only one size" if facts.distinct_sizes == 1 else f"are only {facts.distinct_sizes} sizes"
        yield f"There {sizes}, so shapes alone make nothing compile again."
    if not facts.story and not facts.families:
        yield (
            "The trace does not say what its buffers are. Temporaries inside one jitted program are XLA's to place, "
            "which it does when it compiles: no pool outside of the program can serve them, whatever it would save."
        )


def _holes(bfc: Found, facts: Facts) -> Iterator[str]:
    if bfc.waste is None:
        return
    peak, need = facts.peak_bytes, (bfc.need_bytes or 0) / facts.peak_bytes
    if need > LITTLE:
        yield (
            f"A device with {size_text((need - 1) * peak)} more than the peak is enough for XLA's allocator, without "
            "any pool."
        )
    if bfc.waste.unused_bytes > MUCH * peak:
        yield (
            "Its holes come from buffers that stay between buffers that go: allocate first what stays, and bring small "
            "results to the host, or write them into one array that is kept for them."
        )


def _classes(findings: Findings) -> Iterator[str]:
    facts, plans = findings.facts, findings.plan_bytes
    best = min(plans.values())
    few = min(count for count, needed in plans.items() if needed <= SAME * best)
    now = findings.by_allocator.get(PLAN, Found()).waste
    told = f"{few} size class{'es' if few > 1 else ''}"
    if now is not None and now.total_bytes > SAME * best:
        yield (
            f"With {told} instead of {facts.classes} a plan takes {_times(best / facts.peak_bytes)} instead of "
            f"{_times(now.total_bytes / facts.peak_bytes)}."
        )
    elif len(plans) > 1:
        yield (
            f"More size classes would not help a plan: {told} do as well as {max(plans)}, with "
            f"{_times(plans[few] / facts.peak_bytes)}."
        )


def _more(need: float, than: float, title: str, facts: Facts) -> str:
    if need > SAME * than:
        return f"{title} takes {_times(need)}, {size_text((need - than) * facts.peak_bytes)} more"
    if need * SAME < than:
        return f"{title} takes {_times(need)}, {size_text((than - need) * facts.peak_bytes)} less"
    return f"{title} takes as much"


def _of_peak(ratio: float, facts: Facts) -> str:
    return f"{_times(ratio)} the peak ({size_text(ratio * facts.peak_bytes)})"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}×" if ratio < 100 else f"{ratio:,.0f}×"


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


def _list(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
