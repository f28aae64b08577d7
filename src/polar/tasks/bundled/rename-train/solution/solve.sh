#!/bin/sh
mv desert.txt robin.txt
