"""Data made from recorded sessions: training rows, conversations and pre-tokenised rows, as JSON lines, Parquet and Hugging Face datasets.

`Spec` says what, `export` writes it. Knows stores and trajectories; knows no trainer, and needs no library but pyarrow (for Parquet).
"""

from polar.export.facts import Facts, facts_of, label_line, read_labels
from polar.export.run import About, export
from polar.export.spec import Spec
from polar.export.trajectories import Maker

__all__ = ["Facts", "About", "Maker", "Spec", "export", "facts_of", "label_line", "read_labels"]
