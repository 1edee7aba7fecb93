"""The workload in which streams run beside longer prompts: what the figures of chunked prefill are about."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from latency_lab import token_gaps
from latency_lab.records import Records

MOST_GAPS = 20_000
"""Most gaps of streams that are looked at one by one in a cell, from its start: more are neither seen in a figure nor
read in its CSV."""


@dataclass(frozen=True)
class Beside:
    """One workload of a study.

    study : its cells alone
    long, stream : names of the classes of requests with the longest prompts and outputs
    prompt_tokens : median of the long prompts
    """

    study: Records
    long: str
    stream: str
    prompt_tokens: float

    @property
    def workload(self) -> str:
        return str(self.study.cells["workload"].iloc[0])

    @property
    def traced(self) -> pd.DataFrame:
        """The cells whose steps were recorded."""
        return self.study.cells[self.study.cells["steps"].fillna(0) > 0]

    def first_repeat(self, setting: str) -> Records:
        """The setting's first repeat whose steps were recorded."""
        own = self.traced[self.traced["setting"] == setting]
        return self.study.part(own[own["repeat"] == own["repeat"].min()])

    def gaps(self, cell: Records) -> tuple[pd.DataFrame, float]:
        """Gaps of one cell's streams (see token_gaps.gaps), and how many seconds of the cell they cover.

        Those are all, and infinitely many seconds, unless there are more than MOST_GAPS.
        """
        requests = cell.requests_with(token_gaps.COLUMNS)
        streams = requests[requests["class_name"] != self.long].reset_index(drop=True)
        until_s = token_gaps.arrived_s(streams, MOST_GAPS)
        return token_gaps.gaps(streams, until_s), until_s


def beside(study: Records) -> Beside | None:
    """The first workload in which streams run beside longer prompts.

    None where no workload has a class of long prompts, at least four times the others', and one of longer outputs.
    """
    cells = study.cells[(study.cells["load"] == "mix") & (study.cells["requests"] > 0)]
    for _, own in cells.groupby("workload", sort=False):
        part = study.part(own)
        rows = part.requests_with(["class_name", "prompt_tokens", "output_tokens"])
        sizes = rows.groupby("class_name")[["prompt_tokens", "output_tokens"]].median().astype(float)
        long, stream = sizes["prompt_tokens"].idxmax(), sizes["output_tokens"].idxmax()
        if len(sizes) == 2 and long != stream and sizes["prompt_tokens"].max() >= 4 * sizes["prompt_tokens"].min():
            return Beside(part, str(long), str(stream), float(sizes["prompt_tokens"].max()))
    return None
