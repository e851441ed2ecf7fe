"""Protocols that users can implement, and the few values that they exchange, by their readers.

`state`: a user's own objects (`Stateful`) and frameworks (`Backend`).  `data`: streams and cursors.
`tasks`: the steps of a `Trainer`.  `services`: work around steps.  `metrics`: rows of a metric.
`group`: several processes that train together.
"""
