"""Every protocol that somebody can implement, and the few values they exchange, by who reads them.

`state`: a user's own objects (`Stateful`) and frameworks (`Backend`).  `data`: streams and cursors.
`tasks`: the steps of a `Trainer`.  `services`: what happens around steps.
"""
