"The models as the papers write them, for one sentence, to read and to compare with."
