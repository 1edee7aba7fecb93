"""Columns of lists as flat arrays: a study has as many tokens as times, and no row of them is looked at by itself."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc


def flat(column: pd.Series) -> tuple[np.ndarray, np.ndarray]:
    """A column of lists as its values one after another, and the length of each list: 0 for null."""
    known = isinstance(column.dtype, pd.ArrowDtype)
    lists = pa.array(column, None if known else pa.list_(pa.float64()), from_pandas=True)
    lists = lists.combine_chunks() if isinstance(lists, pa.ChunkedArray) else lists
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    return lists.flatten().to_numpy(zero_copy_only=False), lengths
