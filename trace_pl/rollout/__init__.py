"""From questions to finished trajectories: token record, chat template, engines, agent loop."""
