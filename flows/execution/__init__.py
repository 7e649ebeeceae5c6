"""Running trials and experiments: a trial on a cluster, its attempts, drivers, the grid."""
