"""Fault plans on a real cluster, with proof that each fault happened.

`injector` waits for a fault's moment, `targets` says whom it hits, and `acts` begins and ends it;
`kill_and_pause` carries out these two, `kinds` says what carries out each of the others.
"""
