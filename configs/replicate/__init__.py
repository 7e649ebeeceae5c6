"""The experiments that repeat those of two papers; `dps replicate` runs them."""
