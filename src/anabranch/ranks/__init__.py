"""The processes among which a model is divided: one drives, the others follow, and a watch ends all with any."""
