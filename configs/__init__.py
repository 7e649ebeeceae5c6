"""The experiments that come with the package; `dps run NAME` finds them here by file name."""
