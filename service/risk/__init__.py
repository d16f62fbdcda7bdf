"""From a photo's similarity to a decision: all that yields a threshold, in this order.

1. `service.risk.evidence`: similarities between the people of a gallery.
2. `models.risk`: what they and the pack's calibration say of strangers (`models.risk.gallery_risk`).
3. `service.risk.gallery_risks`: keeps that of each gallery up to date, and returns it for a search.
4. `service.risk.probe_windows`: recent photos that are unlike the gallery raise it.
5. `service.risk.decision`: thresholds for the accepted risk, and the outcome of a search or a comparison.
6. `service.risk.verification`: the similarity of a pair, and the rules that decide it.

What is told of it: `service.risk.risk_report`, `service.risk.drift`, `service.risk.drift_reports` and
`service.risk.hygiene`.
"""
