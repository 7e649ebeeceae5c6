"""How much a configuration may ask for: bounds that nothing sensible comes near.

Each keeps what is a mistake, or meant to do harm, from taking minutes and gigabytes before anybody
says a word. They are checked before anything is expanded, and named in the message. What is just
below all of them is read and planned within seconds and a few hundred megabytes.
"""

from __future__ import annotations

# -- the text ------------------------------------------------------------------------------------

# The largest configuration that comes with dps has 6 kB, 200 values and 6 levels.
MOST_BYTES = 256 * 1024
MOST_VALUES = 10_000  # aliases counted as often as they are used
DEEPEST = 20
LONGEST_KEY = 500  # also of labels
LONGEST_TEXT = 4_096  # a path may be so long
LONGEST_NUMBER = 100  # characters
LARGEST_NUMBER = 2**64 - 1  # of whole numbers: what fits into 8 bytes, as seeds are drawn

LONGEST_WORD = 1_000  # of the command line, but for what --set is given

# -- what it stands for --------------------------------------------------------------------------

LONGEST_NAME = 200  # of experiments and trials, which are names of folders: 255 at most, with .part
MOST_AXES = 20
MOST_EXCLUDED = 100
MOST_COMBINATIONS = 20_000  # before any is left out
MOST_TRIALS = 10_000
MOST_NODES = 2_000  # processes of one trial
# Each trial is held with its nodes and faults while the grid is planned.
MOST_IN_ALL = 1_000_000
MOST_ENTRIES = (
    1_000  # of a list of faults or changes; `dps.core.faults.expansion` bounds what they become
)
MOST_LAYERS = 100
MOST_WEIGHTS = 100_000_000  # 0.4 GB in each node that holds them

# -- tables -------------------------------------------------------------------------------------

MOST_TRACE_BYTES = 1024 * 1024
MOST_CURVE_BYTES = 64 * 1024 * 1024  # of published curves, with a row for each evaluation

# -- messages ------------------------------------------------------------------------------------

MOST_COMPLAINTS = 10
MOST_LISTED = 24  # names that are told of
