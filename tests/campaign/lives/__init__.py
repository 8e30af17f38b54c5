"""Lives of one engine, of any family, drawn from seeds and held against the plain model.

    python -m tests.campaign.lives --seeds 500

A seed stands for a model, its engine's settings, pools of any size, requests with any wishes, and
for what happens to them. Drafts are right as often as is drawn: those of random weights never are.
"""
