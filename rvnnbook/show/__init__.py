"Figures: plots, drawings of trees (`show.trees.tree_drawing`), steppers, result tables."
