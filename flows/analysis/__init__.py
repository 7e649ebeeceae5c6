"""What a recorded trial amounts to: outcomes, groups of trials, statistics and comparisons."""
