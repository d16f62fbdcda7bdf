"""From a photo's similarity to a decision: all that yields a threshold.

`service.risk.search` calls the steps for a search, `service.usecases.verify` for a pair:

1. `service.risk.evidence`: similarities between the people of a gallery (`models.risk.impostor_evidence`).
2. `models.risk.gallery_risk`: the score curve of strangers, fitted to the evidence and to the pack's calibration
   (`calibration`, `normal_scale`).
3. `service.risk.gallery_risks`: keeps the model of each gallery up to date, and returns it.
4. `service.risk.threshold`: thresholds for the accepted risk. No other module makes one that decides.
5. `service.risk.decision`: the outcome of a search or a pair.
6. `service.risk.one_face`: decisions of a search that another face of the photo changes. They only demote.

Reports: `service.risk.risk_report`, `service.risk.drift` and `service.risk.hygiene`.
"""
