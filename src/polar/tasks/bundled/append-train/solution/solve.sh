#!/bin/sh
echo carbon >> snow.txt
