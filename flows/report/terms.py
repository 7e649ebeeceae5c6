"""The terms that a report uses, each in a line, for readers who have not read the documentation."""

TERMS: tuple[tuple[str, str], ...] = (
    ("trial", "One training with one setting and one seed."),
    ("seed", "The number that fixes what is random in a trial: initial weights, batches, faults."),
    ("condition", "What trials are run under besides the strategy, such as “kill” or “no fault”."),
    ("shard", "A part of the model's weights, kept by one server."),
    ("server, replica", "A node that keeps a shard; one of several that keep the same one."),
    ("worker", "A node that computes gradients and pushes them to the servers."),
    ("gradient", "What a worker computes from one batch and pushes to all shards."),
    ("update", "The part of a gradient that one shard gets: with 2 shards, 2 for each gradient."),
    (
        "acked",
        "Of an update: acknowledged. Its worker was told that it is as safe as the strategy "
        "promises.",
    ),
    (
        "staleness",
        "By how many updates a shard had gone on between a worker's read and its gradient.",
    ),
    (
        "applied twice, replica conflicts, audit mismatches",
        "What must never be: an update that counted twice; replicas of a shard that differ in what "
        "they applied; a shard that does not hold what its record says.",
    ),
    ("outage", "A time in which a shard was not served because of a fault."),
    (
        "effect",
        "What a fault did to the training: the difference from the control at the same time, or "
        "after as many gradients, or for as much money.",
    ),
    ("control", "The trial that is the same, seed included, but for its faults: it has none."),
    (
        "lost, replayed, refused",
        "Updates that were acknowledged and are not in the final state; those that were kept "
        "during an outage and applied after it; those that came again and were not applied again.",
    ),
    ("asynchronous (ASP)", "No worker waits for another."),
    (
        "bounded staleness (SSP)",
        "A worker waits when it is more than a bound ahead of the slowest.",
    ),
    ("synchronous (BSP)", "A shard applies one update of each worker, all together."),
    ("p99", "The value that 99% are at most."),
)
