"""Protocols that users can implement, and the few values that they exchange.

The rooms know each other through these, so each can be replaced and tested alone.

`state`: a user's own objects (`Stateful`) and frameworks (`Backend`).  `data`: streams and cursors.
`tasks`: the steps of a `Trainer`.  `services`: work around steps.  `metrics`: rows of a metric.
`group`: several processes that train together.
"""
